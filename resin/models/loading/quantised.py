"""Packed number formats of safetensors files, decoded with NumPy: MXFP4 blocks and FP8 with block scales."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import TensorInfo, Window, cut

MXFP4_VALUES = 32  # values that share one scale
# e2m1 code -> value; codes 8 to 15 are the same negated.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NIBBLES = np.concatenate([E2M1, -E2M1])
# Byte -> its two values; the low nibble is the even index.
_PAIRS = np.stack([_NIBBLES[np.arange(256) & 15], _NIBBLES[np.arange(256) >> 4]], axis=-1)
# e8m0 byte -> 2^(byte - 127); 255 means not-a-number.
E8M0 = np.append(np.ldexp(np.float32(1.0), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)

_BLOCKS, _SCALES = "_blocks", "_scales"
_FP8_SCALE = "_scale_inv"
_FP8_TYPES = ("float8_e4m3fn", "float8_e5m2")
_FP8_SCALE_TYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_DEFAULT_FP8_BLOCK = (128, 128)


def dequantise(values: np.ndarray, scales: np.ndarray, window: Window, config: Mapping[str, Any]) -> np.ndarray:
    """Decodes a window of a packed tensor: MXFP4 where the values are bytes, else FP8 in the config's blocks.

    What lies outside the window's rows (MXFP4: experts) is neither read nor decoded.
    """
    if values.dtype == np.uint8:
        experts = window[:1]
        return cut(dequantise_mxfp4(cut(values, experts), cut(scales, experts)), (slice(None), *window[1:]))
    block = fp8_block(config)
    if not window:
        return dequantise_fp8(values, scales, block)
    # Whole blocks, then what was asked for.
    starts = [part.start // size for part, size in zip(window, block, strict=False)]
    ends = [-(-part.stop // size) for part, size in zip(window, block, strict=False)]
    blocks = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
    around = tuple(slice(part.start * size, part.stop * size) for part, size in zip(blocks, block, strict=False))
    decoded = dequantise_fp8(cut(values, around), cut(scales, blocks), block)
    inside = (slice(part.start - near.start, part.stop - near.start) for part, near in zip(window, around, strict=True))
    return cut(decoded, tuple(inside))


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes MXFP4 experts into the orientation of the unpacked checkpoint.

    Args:
        blocks: uint8 `[E, rows, in / 32, 16]`, two values a byte, low nibble first.
        scales: uint8 `[E, rows, in / 32]`, exponent biased by 127.

    Returns:
        bfloat16 `[E, in, rows]` (y = x @ w). Exact: a value has two significant bits.
    """
    experts, rows, groups, _ = blocks.shape
    result = np.empty((experts, groups * MXFP4_VALUES, rows), ml_dtypes.bfloat16)
    for expert in range(experts):
        values = _PAIRS[blocks[expert]].reshape(rows, groups, MXFP4_VALUES)
        values *= E8M0[scales[expert]][..., None]
        result[expert] = values.reshape(rows, -1).T
    return result


def dequantise_fp8(weight: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Decodes FP8 with one scale a block; the last blocks may be ragged.

    Args:
        weight: float8 `[N, K]`.
        scales: float32 `[ceil(N / block[0]), ceil(K / block[1])]`.
        block: rows and columns that share a scale.

    Returns:
        float32 `[N, K]`.
    """
    result = weight.astype(np.float32)
    columns = np.repeat(scales.astype(np.float32), block[1], axis=1)[:, : weight.shape[1]]
    for index, scale in enumerate(columns):
        result[index * block[0] : (index + 1) * block[0]] *= scale
    return result


def find_quantised(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors that exist only in packed form, with shape and dtype after dequantisation."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in tensors:
            if len(info.shape) == 4:
                experts, rows, groups, _ = info.shape
                found[name.removesuffix(_BLOCKS)] = TensorInfo((experts, groups * MXFP4_VALUES, rows), "bfloat16")
        elif info.dtype in _FP8_TYPES and name + _FP8_SCALE in tensors:
            found[name] = TensorInfo(info.shape, "float32")
    return found


def packed_parts(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, str]:
    """Returns the names of a quantised tensor's values and scales."""
    if name in tensors:
        return name, name + _FP8_SCALE
    return name + _BLOCKS, name + _SCALES


def check_packed(name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the packed form of a quantised tensor, or None."""
    values, scales = (tensors[part] for part in packed_parts(name, tensors))
    if values.dtype in _FP8_TYPES:
        if scales.dtype not in _FP8_SCALE_TYPES:
            return f"scales are {scales.dtype}, expected {' or '.join(_FP8_SCALE_TYPES)}"
        if len(values.shape) != 2 or len(scales.shape) != 2:
            return f"shapes {values.shape} and {scales.shape} are not matrices"
        block = fp8_block(config)
        grid = tuple(-(-size // step) for size, step in zip(values.shape, block, strict=True))
        return None if scales.shape == grid else f"scales have shape {scales.shape}, expected {grid} for blocks {block}"
    if (values.dtype, scales.dtype) != ("uint8", "uint8"):
        return f"blocks and scales are {values.dtype} and {scales.dtype}, expected uint8"
    if values.shape[3] * 2 != MXFP4_VALUES or scales.shape != values.shape[:3]:
        expected = "[E, rows, groups, 16] and [E, rows, groups]"
        return f"blocks have shape {values.shape} and scales {scales.shape}, expected {expected}"
    return None


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share one FP8 scale, from `quantization_config` (128 by 128 unless it says otherwise).

    Raises:
        InvalidRequest: it says something else than two sizes.
    """
    packed = ConfigReader.of(config).section("quantization_config")
    if packed is None or "weight_block_size" not in packed:
        return _DEFAULT_FP8_BLOCK
    block = packed.integers("weight_block_size", low=1)
    if block is None or len(block) != 2:
        packed.refuse("weight_block_size", packed["weight_block_size"], "two sizes: one scale a matrix is not read")
    return (block[0], block[1])
