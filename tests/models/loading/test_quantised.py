"""MXFP4 and FP8 against formulas written out value by value."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from resin.models.loading import CheckpointError, open_checkpoint_path
from resin.models.loading.formats.mxfp4 import dequantise_mxfp4
from resin.models.loading.formats.scaled import scale_blocks
from tests.models.loading.safetensors_files import write_directory

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def expected_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    experts, rows, groups, _ = blocks.shape
    result = np.zeros((experts, groups * 32, rows), np.float64)
    for expert, row, group, byte in np.ndindex(blocks.shape):
        scale = 2.0 ** (int(scales[expert, row, group]) - 127)
        value = int(blocks[expert, row, group, byte])
        result[expert, group * 32 + 2 * byte, row] = E2M1[value & 15] * scale
        result[expert, group * 32 + 2 * byte + 1, row] = E2M1[value >> 4] * scale
    return result


def make_mxfp4(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    return (
        draws.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8),
        draws.integers(100, 140, (2, 6, 3), dtype=np.uint8),
    )


def test_mxfp4_is_exact_in_bfloat16() -> None:
    blocks, scales = make_mxfp4()
    found = dequantise_mxfp4(blocks, scales)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float64), expected_mxfp4(blocks, scales))


def test_mxfp4_scale_extremes() -> None:
    blocks = np.full((1, 1, 2, 16), 0x22, np.uint8)
    found = dequantise_mxfp4(blocks, np.array([[[0, 255]]], np.uint8)).astype(np.float64)
    np.testing.assert_array_equal(found[0, :32, 0], 2.0**-127)
    assert np.isnan(found[0, 32:, 0]).all()


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (256, 64)])
def test_fp8_blocks_may_be_ragged(shape: tuple[int, int]) -> None:
    draws = np.random.default_rng(3)
    weight = draws.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    grid = (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = draws.uniform(0.5, 2, grid).astype(np.float32)
    rows, columns = np.indices(shape)
    expected = weight.astype(np.float32) * scales[rows // 128, columns // 128]
    found = scale_blocks(weight.astype(np.float32), scales, None, (128, 128))
    np.testing.assert_array_equal(found, expected)


def test_packed_tensors_are_offered_beside_their_raw_parts(tmp_path: Path) -> None:
    blocks, scales = make_mxfp4()
    draws = np.random.default_rng(5)
    fp8 = draws.standard_normal((40, 70)).astype(ml_dtypes.float8_e4m3fn)
    grid = draws.uniform(0.5, 2, (2, 3)).astype(np.float32)
    tensors = {
        "e.gate_up_proj_blocks": blocks,
        "e.gate_up_proj_scales": scales,
        "q.weight": fp8,
        "q.weight_scale_inv": grid,
        "norm.weight": np.ones(3, np.float32),
    }
    config = {"quantization_config": {"weight_block_size": [32, 32]}}
    checkpoint = open_checkpoint_path(write_directory(tmp_path / "m", {"model.safetensors": tensors}, config))
    assert checkpoint.quantised == {
        "e.gate_up_proj": ((2, 96, 6), "bfloat16", ("e.gate_up_proj_blocks", "e.gate_up_proj_scales")),
        "q.weight": ((40, 70), "float32", ("q.weight", "q.weight_scale_inv")),
    }
    for name, expected in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), expected)
    for name, info in checkpoint.quantised.items():
        found = checkpoint.read_dequantised(name)
        assert (found.shape, found.dtype.name) == (info.shape, info.dtype)
        for window in ((slice(1, 2),), *(tuple(slice(size // 3, size - 1) for size in info.shape),) * (name[0] == "q")):
            np.testing.assert_array_equal(checkpoint.read_dequantised(name, window), found[window])
    np.testing.assert_array_equal(
        checkpoint.read_dequantised("e.gate_up_proj").astype(np.float64), expected_mxfp4(blocks, scales)
    )
    rows, columns = np.indices(fp8.shape)
    expected = fp8.astype(np.float32) * grid[rows // 32, columns // 32]
    np.testing.assert_array_equal(checkpoint.read_dequantised("q.weight"), expected)
    np.testing.assert_array_equal(checkpoint.read_dequantised("norm.weight"), tensors["norm.weight"])


@pytest.mark.parametrize(
    ("tensors", "tensor", "reason"),
    [
        (
            {"w": np.zeros((40, 70), ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones((2, 1), np.float32)},
            "w",
            r"scales have shape \(2, 1\), expected \(1, 1\) for blocks \(128, 128\)",
        ),
        (
            {"w": np.zeros(40, ml_dtypes.float8_e4m3fn), "w_scale_inv": np.ones(1, np.float32)},
            "w",
            "are not matrices",
        ),
        (
            {"w_blocks": np.zeros((1, 2, 3, 16), np.uint8), "w_scales": np.zeros((1, 2, 4), np.uint8)},
            "w_blocks",
            r"scales \(1, 2, 4\)",
        ),
        (
            {"w_blocks": np.zeros((1, 2, 3, 16), np.int8), "w_scales": np.zeros((1, 2, 3), np.uint8)},
            "w_blocks",
            "expected uint8",
        ),
    ],
)
def test_packed_parts_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], tensor: str, reason: str
) -> None:
    directory = write_directory(tmp_path / "m", {"model.safetensors": tensors})
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint_path(directory)
    assert caught.value.tensor == tensor
