from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import find_model_class, read_config, read_model
from resin.models.loading.checkpoint import CheckpointError, Window
from resin.models.loading.quantised import find_packed
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, fp8_checkpoint, random_checkpoint
from resin.models.tying import settled_settings
from resin.models.weights import AbstractModel, StoredTensor, check_tensors, dummy_weights, load_weights, read_share
from resin.runtime.mesh import build_mesh
from resin.runtime.options import RunnerOptions
from resin.topology import MeshShape


def tiny(tp: int = 1, dtype: str = "float32") -> AbstractModel:
    config = TINY_CONFIGS["llama"]
    model_class = find_model_class(config)
    return AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement(dtype, mesh=MeshShape(tp=tp))))


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


def test_a_message_names_a_few_of_many_faults() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    for name in list(checkpoint.arrays):
        checkpoint.arrays[f"{name}.copy"] = checkpoint.arrays.pop(name)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tiny(), checkpoint)
    text = str(caught.value)
    faults = 2 * len(checkpoint.arrays)
    assert f"{faults} tensors do not fit" in text and text.endswith(f"and {faults - 8} more")
    assert text.count("missing ") + text.count("extra ") == 8


INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@pytest.mark.parametrize("dtype", [*INTEGERS, *EIGHT_BITS])
@pytest.mark.parametrize("family", ["llama", "lfm2_moe", "gpt_oss"])
def test_numbers_that_need_a_scale_are_not_read_without(family: str, dtype: str) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS[family])
    model_class, config = read_model(checkpoint)
    model = AbstractModel.of(model_class(config, Placement()))
    check_tensors(model, checkpoint)
    kinds = {re.sub(r"\.\d+\.", ".*.", name): name for name in checkpoint.arrays}  # one layer stands for all
    for name in kinds.values():
        array = checkpoint.arrays[name]
        if array.dtype.name == dtype or "_blocks" in name or "_scales" in name:
            continue  # packed values may be uint8; a wrong pair of them is refused when the file is opened
        checkpoint.arrays[name] = array.astype(dtype)
        with pytest.raises(CheckpointError, match=f"1 tensors do not fit the model: {dtype} in {name}") as caught:
            check_tensors(model, checkpoint)
        assert ("scale for it is not stored" in str(caught.value)) == (dtype in EIGHT_BITS)
        checkpoint.arrays[name] = array


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_plain_floats_of_every_width_are_read(dtype: str) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    checkpoint.arrays = {name: array.astype(dtype) for name, array in checkpoint.arrays.items()}
    check_tensors(tiny(), checkpoint)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.input_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight_scale_inv.weight",
        "model.layers.0.self_attn.q_proj2.weight",
    ],
)
def test_a_quantised_matrix_excuses_its_own_scale_alone(extra: str) -> None:
    checkpoint = fp8_checkpoint(random_checkpoint(TINY_CONFIGS["llama"]))
    check_tensors(tiny(), checkpoint)
    checkpoint.arrays[extra] = np.ones((2, 2), np.float32)
    with pytest.raises(CheckpointError, match=f"1 tensors do not fit the model: extra {extra}"):
        check_tensors(tiny(), checkpoint)


@pytest.mark.parametrize("scales", ["int32", "uint8", "float8_e4m3fn"])
def test_a_scale_is_a_number_of_its_own(scales: str) -> None:
    checkpoint = fp8_checkpoint(random_checkpoint(TINY_CONFIGS["llama"]))
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint.arrays[f"{name}_scale_inv"] = checkpoint.arrays[f"{name}_scale_inv"].astype(scales)
    packed = find_packed(checkpoint.tensors, checkpoint.config, checkpoint.read)
    assert scales in str(packed[name].fault(checkpoint.tensors))


def test_tied_checkpoint_may_store_its_head_and_rope_tables() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    checkpoint.arrays["lm_head.weight"] = checkpoint.arrays["model.embed_tokens.weight"].copy()
    checkpoint.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    assert read_model(checkpoint)[1].tied
    assert len(load_weights(tiny(), checkpoint, build_mesh(RunnerOptions()))) == len(tiny().declarations)
    checkpoint.arrays["draft_lm_head.weight"] = np.zeros((2, 2), np.float32)
    with pytest.raises(CheckpointError, match=r"extra draft_lm_head\.weight"):
        check_tensors(tiny(), checkpoint)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2"])
def test_a_stored_head_of_its_own_is_used_whatever_the_config_says(family: str) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS[family])
    table = checkpoint.arrays["model.embed_tokens.weight"]
    assert read_model(checkpoint)[1].tied
    head = table.copy()
    head[-1, -1] += 1.0
    checkpoint.arrays["lm_head.weight"] = head
    model_class, config = read_model(checkpoint)
    model = AbstractModel.of(model_class(config, Placement()))
    arrays = dict(zip(model.names, load_weights(model, checkpoint, build_mesh(RunnerOptions())), strict=True))
    np.testing.assert_array_equal(arrays["vocabulary.head"], head.T)
    np.testing.assert_array_equal(arrays["vocabulary.table"], table)
    # What is converted is read the same way again.
    assert read_config({**checkpoint.config, **settled_settings(config, checkpoint.config)})[1] == config


def test_a_tied_table_may_be_stored_as_the_head_alone() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    model = tiny()
    expected = load_weights(model, checkpoint, build_mesh(RunnerOptions()))
    checkpoint.arrays["lm_head.weight"] = checkpoint.arrays.pop("model.embed_tokens.weight")
    found = load_weights(model, checkpoint, build_mesh(RunnerOptions()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    untied = random_checkpoint({**TINY_CONFIGS["llama"], "tie_word_embeddings": False})
    del untied.arrays["model.embed_tokens.weight"]
    model_class, config = read_model(untied)
    with pytest.raises(CheckpointError, match=r"missing model\.embed_tokens\.weight"):
        check_tensors(AbstractModel.of(model_class(config, Placement())), untied)


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


class CountingCheckpoint(MemoryCheckpoint):
    """Counts the bytes that are read of it."""

    nbytes = 0

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        part = super().read(name, window)
        self.nbytes += part.nbytes
        return part


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        (family, tp)
        for family, config in TINY_CONFIGS.items()
        for tp in (1, 2, 4)
        if config["num_attention_heads"] % tp == config.get("num_experts", 0) % tp == 0
    ],
)
def test_a_device_s_share_reads_what_it_holds(family: str, tp: int) -> None:
    made = random_checkpoint(TINY_CONFIGS[family])
    checkpoint, mesh = CountingCheckpoint(made.config, made.arrays), build_mesh(RunnerOptions(tp=tp))
    model_class, config = read_model(checkpoint)
    model = AbstractModel.of(model_class(config, Placement("float32", mesh=MeshShape(tp=tp))))
    for declaration, argument in zip(model.declarations, model.arguments(mesh), strict=True):
        tensors = [StoredTensor(checkpoint, name) for name in declaration.sources]
        stored = sum(checkpoint.arrays[name].nbytes for name in declaration.sources)
        for index in argument.sharding.devices_indices_map(argument.shape).values():
            checkpoint.nbytes = 0
            window = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, argument.shape, strict=True))
            share = read_share(declaration, tensors, argument.shape, window)
            assert checkpoint.nbytes * math.prod(declaration.shape) == stored * share.size, declaration.sources


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
