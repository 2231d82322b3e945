"""Weights that went to the devices come back as the checkpoint that they were, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

from resin.models.assemblies import OnePlus, Tensor
from resin.models.declare import Placement
from resin.models.families import read_model
from resin.models.loading.checkpoint import Checkpoint, CheckpointError, Window
from resin.models.registry import open_checkpoint
from resin.models.saving import save_checkpoint, take_apart
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, fp8_checkpoint, random_checkpoint
from resin.models.weights import AbstractModel, load_weights
from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh
from resin.topology import MeshShape


def load(checkpoint: Checkpoint, *, dtype: str = "float32", tp: int = 1) -> tuple[AbstractModel, tuple[jax.Array, ...]]:
    model_class, config = read_model(checkpoint)
    model = AbstractModel.of(model_class(config, Placement(dtype, mesh=MeshShape(tp=tp))))
    return model, load_weights(model, checkpoint, build_mesh(RunnerOptions(tp=tp)))


def assert_same_weights(checkpoint: Checkpoint, weights: Sequence[jax.Array], dtype: str = "float32") -> None:
    for one, other in zip(load(checkpoint, dtype=dtype)[1], weights, strict=True):
        assert one.dtype == other.dtype and np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS[family])
    model, weights = load(checkpoint)
    save_checkpoint(tmp_path / "saved", model, weights, checkpoint.config)
    saved = open_checkpoint(tmp_path / "saved")
    assert saved.tensors == checkpoint.tensors
    sums = {name for item in model.declarations if isinstance(item.assembly, OnePlus) for name in item.sources}
    assert bool(sums) is family.startswith("gemma")
    for name, array in checkpoint.arrays.items():
        if name in sums:  # 1 + w has kept fewer bits of w, and all of them are in the file
            np.testing.assert_allclose(saved.read(name), array, rtol=0, atol=2**-23)
        else:
            assert saved.read(name).tobytes() == array.tobytes(), name
    assert_same_weights(saved, weights)
    saved.close()


@pytest.mark.parametrize("tp", [2, 4])
def test_shares_of_devices_are_joined(tp: int, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    model, weights = load(checkpoint, tp=tp)
    saved = open_checkpoint(save_checkpoint(tmp_path, model, weights, checkpoint.config))
    assert {name: saved.read(name).tobytes() for name in saved.tensors} == {
        name: array.tobytes() for name, array in checkpoint.arrays.items()
    }
    saved.close()


def test_copies_that_no_longer_agree_are_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])  # 2 KV heads: 4 devices hold each twice
    model, weights = load(checkpoint, tp=4)
    place = next(i for i, declaration in enumerate(model.declarations) if "k_proj" in str(declaration.sources))
    moved = weights[place].at[:, -1].add(1.0)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight.*written back"):
        save_checkpoint(tmp_path, model, (*weights[:place], moved, *weights[place + 1 :]), checkpoint.config)
    assert not list(tmp_path.glob("*.safetensors*")), "nothing that looks like a result is left"


def test_bfloat16_and_decoded_weights_are_saved_as_they_are(tmp_path: Path) -> None:
    checkpoint = fp8_checkpoint(random_checkpoint(TINY_CONFIGS["llama"]))
    model, weights = load(checkpoint, dtype="bfloat16")
    saved = open_checkpoint(save_checkpoint(tmp_path, model, weights, checkpoint.config))
    assert {info.dtype for info in saved.tensors.values()} == {"bfloat16"}
    assert "quantization_config" not in saved.config
    assert_same_weights(saved, weights, "bfloat16")
    saved.close()


def test_the_config_says_whether_the_head_is_tied(tmp_path: Path) -> None:
    held = random_checkpoint(TINY_CONFIGS["llama"])
    assert held.config["tie_word_embeddings"]
    head = held.arrays["model.embed_tokens.weight"] + 1
    checkpoint = MemoryCheckpoint(held.config, held.arrays | {"lm_head.weight": head})
    model, weights = load(checkpoint)
    saved = open_checkpoint(save_checkpoint(tmp_path, model, weights, checkpoint.config))
    assert saved.config["tie_word_embeddings"] is False and np.array_equal(saved.read("lm_head.weight"), head)
    saved.close()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["llama"])
    model, weights = load(checkpoint)
    for wrong in (weights[:-1], (weights[0][:-1], *weights[1:])):
        with pytest.raises(ValueError, match=r"argument|shape"):
            save_checkpoint(tmp_path, model, wrong, checkpoint.config)


@dataclass(frozen=True)
class Doubled:
    """An assembly that computes."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        out[...] = tensors[0][window] // 2


def test_an_assembly_that_computes_is_noticed() -> None:
    from resin.models.declare import declare

    declaration = declare((4, 2), Placement(), "w", assembly=Doubled()).declaration
    with pytest.raises(CheckpointError, match="written back"):
        take_apart(declaration, np.arange(8, dtype=np.float32).reshape(4, 2))
