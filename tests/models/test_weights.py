from __future__ import annotations

import jax
import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.loading.checkpoint import CheckpointError
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.models.weights import AbstractModel, dummy_weights, load_weights
from resin.runtime.mesh import build_mesh
from resin.runtime.options import RunnerOptions


def tiny(tp: int = 1, dtype: str = "float32") -> AbstractModel:
    config = TINY_CONFIGS["llama"]
    model_class = find_model_class(config)
    return AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement(dtype, tp=tp)))


def test_every_fault_is_named_in_one_error() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    del checkpoint.arrays["model.norm.weight"]
    checkpoint.arrays["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)
    checkpoint.arrays["model.layers.7.odd"] = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_weights(tiny(), checkpoint, build_mesh(RunnerOptions()))
    text = str(caught.value)
    assert "missing model.norm.weight [64]" in text
    assert "misshapen model.layers.0.mlp.up_proj.weight [3, 4], expected [128, 64]" in text
    assert "extra model.layers.7.odd [2]" in text
    assert "3 tensors" in text


def test_tied_checkpoint_may_store_its_head_and_rope_tables() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    checkpoint.arrays["lm_head.weight"] = checkpoint.arrays["model.embed_tokens.weight"]
    checkpoint.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert len(load_weights(tiny(), checkpoint, build_mesh(RunnerOptions()))) == len(tiny().declarations)


def test_weights_land_with_their_shardings_and_progress_is_complete() -> None:
    mesh = build_mesh(RunnerOptions(tp=2))
    model = tiny(tp=2)
    seen: list[tuple[str, int, int | None]] = []
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    arrays = load_weights(model, checkpoint, mesh, progress=lambda *call: seen.append(call))
    assert seen[-1][1:] == (model.nbytes, model.nbytes)
    assert sorted(name for name, _, _ in seen) == sorted(model.names)
    for array, argument in zip(arrays, model.arguments(mesh), strict=True):
        assert array.sharding == argument.sharding
        assert (array.shape, array.dtype) == (argument.shape, argument.dtype)
    held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert held == model.device_nbytes(mesh) < model.nbytes


def test_loaded_arrays_do_not_alias_the_checkpoint() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    model = tiny()
    arrays = dict(zip(model.names, load_weights(model, checkpoint, build_mesh(RunnerOptions())), strict=True))
    before = np.array(arrays["norm.weight"])
    checkpoint.arrays["model.norm.weight"][:] = -1.0
    np.testing.assert_array_equal(arrays["norm.weight"], before)


def test_size_report_counts_products_once() -> None:
    model = tiny()
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert model.flops_per_token == 2 * (2 * layer + 64 * 256)
    assert model.nbytes == 4 * (2 * layer + 64 * 256 + 5 * 64)


def test_dummy_weights_follow_the_declared_distributions() -> None:
    model = tiny(dtype="bfloat16")
    arrays = dummy_weights(model, build_mesh(RunnerOptions()), seed=3)
    for array, declaration in zip(arrays, model.declarations, strict=True):
        values = np.asarray(array, np.float32)
        assert array.dtype == jax.numpy.bfloat16
        assert abs(values.mean() - declaration.init.mean) < 0.05
        assert abs(values.std() - declaration.init.std) < 0.05
