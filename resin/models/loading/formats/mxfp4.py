"""MXFP4: four bits a number, a power of two for every 32 of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from resin.models.loading.checkpoint import TensorInfo, Window, cut
from resin.models.loading.formats.packed_tensor import Read, Tensors

MXFP4_VALUES = 32  # values that share one scale
# e2m1 code -> value; codes 8 to 15 are the same negated.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NIBBLES = np.concatenate([E2M1, -E2M1])
# Byte -> its two values; the low nibble is the even index.
_PAIRS = np.stack([_NIBBLES[np.arange(256) & 15], _NIBBLES[np.arange(256) >> 4]], axis=-1)
# e8m0 byte -> 2^(byte - 127); 255 means not-a-number.
E8M0 = np.append(np.ldexp(np.float32(1.0), np.arange(-127, 128)), np.float32(np.nan)).astype(np.float32)

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """A stack of matrices as uint8 `[E, rows, groups, 16]` and `[E, rows, groups]`."""

    name: str
    shape: tuple[int, ...]  # of the blocks

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name + _BLOCKS, self.name + _SCALES

    @property
    def info(self) -> TensorInfo:
        experts, rows, groups, _ = self.shape
        return TensorInfo((experts, groups * MXFP4_VALUES, rows), "bfloat16")

    @property
    def about(self) -> str:
        return "MXFP4"

    def fault(self, tensors: Tensors) -> str | None:
        values, scales = (tensors[part] for part in self.parts)
        if (values.dtype, scales.dtype) != ("uint8", "uint8"):
            return f"blocks and scales are {values.dtype} and {scales.dtype}, expected uint8"
        if values.shape[3] * 2 != MXFP4_VALUES or scales.shape != values.shape[:3]:
            expected = "[E, rows, groups, 16] and [E, rows, groups]"
            return f"blocks have shape {values.shape} and scales {scales.shape}, expected {expected}"
        return None

    def decode(self, read: Read, window: Window) -> np.ndarray:
        blocks, scales = (read(part, window[:1]) for part in self.parts)
        return cut(dequantise_mxfp4(blocks, scales), (slice(None), *window[1:]))


def find_mxfp4(tensors: Tensors) -> Iterator[tuple[str, Mxfp4Experts]]:
    """Those of a checkpoint, by their names."""
    for stored, info in tensors.items():
        name = stored.removesuffix(_BLOCKS)
        if stored.endswith(_BLOCKS) and name + _SCALES in tensors and len(info.shape) == 4:
            yield name, Mxfp4Experts(name, info.shape)


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
