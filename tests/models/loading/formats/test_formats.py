"""Every packed format against formulas over single bits; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import read_config, read_model
from resin.models.loading import Checkpoint, CheckpointError, open_checkpoint_path
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, random_checkpoint, write_checkpoint
from resin.models.weights import AbstractModel, load_weights
from resin.plan import InvalidRequest
from resin.runtime import RunnerOptions
from resin.runtime.mesh import build_mesh
from tests.models.loading.formats.packed_files import FP8, MAKERS, PackedFile, awq, compressed, gptq, int8_rows, nf4
from tests.models.loading.safetensors_files import write_directory


def opened(tmp_path: Path, file: PackedFile, **changes: np.ndarray | None) -> Checkpoint:
    tensors = {name: array for name, array in {**file.tensors, **changes}.items() if array is not None}
    stored = {f"l.{name}": array for name, array in tensors.items()}
    config = {"quantization_config": file.quantisation}
    return open_checkpoint_path(write_directory(tmp_path / "model", {"model.safetensors": stored}, config))


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_those_of_the_formula(tmp_path: Path, name: str) -> None:
    file = MAKERS[name]()
    checkpoint = opened(tmp_path, file)
    info = checkpoint.quantised["l.weight"]
    assert (info.shape, info.dtype) == (file.expected.shape, "float32")
    assert set(info.parts) == {f"l.{part}" for part in file.tensors}
    found = checkpoint.read_dequantised("l.weight")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, file.expected, rtol=3e-7, atol=1e-7)
    rows, columns = file.expected.shape
    for window in (
        (slice(3, 11),),
        (slice(0, rows), slice(5, columns - 3)),
        (slice(rows // 2, rows), slice(0, 1)),
        (slice(1, 2), slice(columns - 1, columns)),
    ):
        np.testing.assert_array_equal(checkpoint.read_dequantised("l.weight", window), found[window])
    (note,) = checkpoint.notes
    assert note.startswith("1 packed matrices (") and note.endswith(
        "decoded while they load, and served as plain numbers"
    )


def test_a_zero_of_0_borrows_from_its_word(tmp_path: Path) -> None:
    """Packers take 0x11111111 from whole words: 0x0 becomes 0xEEEEEEEF."""
    file = gptq(outputs=8, inputs=16)
    checkpoint = opened(tmp_path, file, qzeros=np.array([[0xEEEEEEEF]], np.uint32).view(np.int32))
    codes = np.array(
        [[int(file.tensors["qweight"][i // 8, o]) >> 4 * (i % 8) & 15 for i in range(16)] for o in range(8)]
    )
    expected = codes * file.tensors["scales"].astype(np.float64).T
    np.testing.assert_allclose(checkpoint.read_dequantised("l.weight"), expected, rtol=3e-7)


Change = Callable[[np.ndarray], np.ndarray | None]


def gone(array: np.ndarray) -> None:
    """Missing."""


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def twice(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, array])


def short(array: np.ndarray) -> np.ndarray:
    return array[..., :-1]


def beyond(array: np.ndarray) -> np.ndarray:
    return array + 1


@pytest.mark.parametrize(
    ("name", "part", "change", "reason"),
    [
        *(
            (name, part, change, reason)
            for name in ("gptq", "awq")
            for part in ("qzeros", "scales")
            for change, reason in (
                (gone, "is missing"),
                (wide, "is float64"),
                (twice, "has shape"),
                (short, "has shape"),
            )
        ),
        ("gptq", "qweight", wide, "is float64"),
        ("gptq with its order", "g_idx", short, "has shape"),
        ("awq", "qweight", wide, "is float64"),
        ("pack-quantized", "weight_packed", wide, "is float64"),
        ("pack-quantized", "weight_packed", short, "has shape"),
        ("pack-quantized", "weight_scale", gone, "is missing"),
        ("pack-quantized", "weight_scale", wide, "is float64"),
        ("pack-quantized", "weight_scale", twice, "has shape"),
        ("pack-quantized", "weight_scale", lambda scales: np.tile(scales, 3)[:, :7], "7 scales for 60 inputs"),
        ("pack-quantized", "weight_shape", beyond, "has shape"),
        ("pack-quantized", "weight_shape", short, "has shape"),
        ("pack-quantized with zeros", "weight_zero_point", wide, "is float64"),
        ("pack-quantized with zeros", "weight_zero_point", twice, "has shape"),
        ("pack-quantized with its order", "weight_g_idx", short, "has shape"),
        ("fbgemm", "weight_scale", wide, "scales are float64"),
        ("fbgemm", "weight_scale", twice, r"scales have shape \(48, 1\), expected"),
        ("fp8 blocks", "weight_scale_inv", short, r"scales have shape \(2, 2\), expected \(2, 3\)"),
        ("int-quantized with zeros", "weight_zero_point", wide, "is not int8"),
        ("int-quantized with zeros", "weight_zero_point", twice, "is not int8 of shape"),
        *(
            (name, f"weight.{part}", change, reason)
            for name, parts in (("nf4", ("absmax", "quant_map")), ("nf4 twice", ("nested_absmax", "nested_quant_map")))
            for part in parts
            for change, reason in ((gone, "is missing"), (wide, "is float64"), (twice, "has"))
        ),
        ("nf4", "weight", wide, "is float64"),
        ("nf4", "weight", twice, "has 504 numbers, expected 252"),
        ("int8", "SCB", wide, "scales are float64"),
        ("int8", "SCB", short, r"scales have shape \(13,\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, part: str, change: Change, reason: str
) -> None:
    file = MAKERS[name]()
    with pytest.raises(CheckpointError, match=reason) as caught:
        opened(tmp_path, file, **{part: change(file.tensors[part])})
    assert caught.value.tensor is not None and caught.value.tensor.startswith("l.")
    assert reason.startswith("scales") or f"l.{part} " in str(caught.value) or part == "weight_shape"


@pytest.mark.parametrize(
    ("name", "part"), [("gptq with its order", "g_idx"), ("pack-quantized with its order", "weight_g_idx")]
)
@pytest.mark.parametrize("change", [beyond, lambda groups: groups - 1])
def test_groups_that_do_not_exist_are_refused(tmp_path: Path, name: str, part: str, change: Change) -> None:
    file = MAKERS[name]()
    checkpoint = opened(tmp_path, file, **{part: change(file.tensors[part])})
    with pytest.raises(CheckpointError, match=rf"l\.{part} names groups from"):
        checkpoint.read_dequantised("l.weight")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"{", "does not tell"),
        (b"[]", "does not tell"),
        (b'{"shape": [14, 36], "blocksize": 0}', "does not tell"),
        (b'{"shape": [14], "blocksize": 64}', "does not tell"),
        (b'{"shape": [14, 37], "blocksize": 64}', r"l\.weight has 252 numbers, expected 259"),
    ],
)
def test_a_state_that_tells_too_little_is_refused(tmp_path: Path, state: bytes, reason: str) -> None:
    changed = np.frombuffer(state, np.uint8).copy()
    with pytest.raises(CheckpointError, match=reason):
        opened(tmp_path, nf4(), **{"weight.quant_state.bitsandbytes__nf4": changed})


def test_another_layout_of_int8_is_not_read(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, int8_rows(), weight_format=np.ones((), np.uint8))
    assert checkpoint.quantised == {}


_GROUPS = compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"})
_WEIGHTS = _GROUPS["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("quantisation", "field"),
    [
        ({**gptq().quantisation, "bits": 3}, "bits"),
        ({**gptq().quantisation, "group_size": 0}, "group_size"),
        ({**gptq().quantisation, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**gptq().quantisation, "is_marlin_format": True}, "is_marlin_format"),
        ({**gptq().quantisation, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        ({**gptq().quantisation, "odd": 1}, "odd"),
        ({**awq().quantisation, "bits": 8}, "bits"),
        ({**awq().quantisation, "version": "gemv"}, "version"),
        ({**awq().quantisation, "zero_point": False}, "zero_point"),
        ({**_GROUPS, "format": "marlin-24"}, "format"),
        ({**_GROUPS, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({**_GROUPS, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        ({**_GROUPS, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**_GROUPS, "config_groups": {}}, "config_groups"),
        ({**_GROUPS, "config_groups": {"group_0": {"targets": ["Linear"]}}}, "config_groups.group_0.weights"),
        (compressed("pack-quantized", {"num_bits": 3, "type": "int", "strategy": "group"}), "num_bits"),
        (compressed("float-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor"}), "num_bits"),
        (compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor_group"}), "strategy"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "activation_scheme": "odd"}, "activation_scheme"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "modelopt"}, "quant_method"),
    ],
)
def test_settings_that_are_not_decoded_are_refused_by_name(quantisation: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_config({**TINY_CONFIGS["llama"], "quantization_config": quantisation})
    assert field in caught.value.field


def test_groups_that_are_packed_in_two_ways_are_refused() -> None:
    other = {**_WEIGHTS, "weights": {**_WEIGHTS["weights"], "num_bits": 8}}
    with pytest.raises(InvalidRequest, match="config_groups"):
        groups = {"config_groups": {"group_0": _WEIGHTS, "group_1": other}}
        read_config({**TINY_CONFIGS["llama"], "quantization_config": {**_GROUPS, **groups}})


MODEL = {**TINY_CONFIGS["llama"], "tie_word_embeddings": False}
SHAPES = {
    "gptq": lambda out, width: gptq(inputs=width, outputs=out, desc_act=True),
    "awq": lambda out, width: awq(inputs=width, outputs=out),
    "bitsandbytes": lambda out, width: nf4(shape=(out, width), nested=True),
}


@pytest.mark.parametrize("method", SHAPES)
def test_a_model_loads_what_its_packed_files_stand_for(tmp_path: Path, method: str) -> None:
    plain = random_checkpoint(MODEL)
    packed, quantisation = dict(plain.arrays), {}
    for name, array in plain.arrays.items():
        if name.endswith("_proj.weight"):
            file = SHAPES[method](*array.shape)
            quantisation = dict(file.quantisation)
            stem = name.removesuffix("weight")
            packed |= {stem + part: tensor for part, tensor in file.tensors.items()}
            packed[f"{stem}bias"] = np.zeros(len(array), np.float32)  # as some packers write them
            if "weight" not in file.tensors:
                del packed[name]
            plain.arrays[name] = file.expected.astype(np.float32)
    stored = MemoryCheckpoint({**MODEL, "quantization_config": quantisation}, packed)
    checkpoint = open_checkpoint_path(write_checkpoint(tmp_path / "model", stored))
    model_class, config = read_model(checkpoint)
    model, mesh = AbstractModel.of(model_class(config, Placement())), build_mesh(RunnerOptions())
    for one, other in zip(load_weights(model, checkpoint, mesh), load_weights(model, plain, mesh), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=3e-7, atol=1e-7)
    packed[next(name for name in packed if name.endswith(".bias"))][3] = 0.5
    biased = open_checkpoint_path(write_checkpoint(tmp_path / "biased", MemoryCheckpoint(stored.config, packed)))
    with pytest.raises(CheckpointError, match=r"extra .*\.bias"):
        load_weights(model, biased, mesh)
