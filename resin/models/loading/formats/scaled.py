"""Matrices of 8 bits a number with scales: FP8 and INT8, one scale a matrix, a row, or a block of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from resin.models.loading.checkpoint import TensorInfo, Window
from resin.models.loading.formats.packed_tensor import FLOATS, Read, Tensors, bounds

FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("_scale_inv", "_scale")
_SCALE_TYPES = (*FLOATS, "float8_e8m0fnu")
# Beside a matrix: how its layer's inputs and outputs are to be rounded, which nothing here does.
_ROUNDING = ("input_scale", "input_zero_point", "activation_scale", "output_scale")


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """`[out, in]`: the stored number, less a zero, times its scale.

    Attributes:
        name: of the stored numbers, and of the matrix.
        scale: tensor of the scales.
        shape: of the matrix.
        scale_shape: of the scales as stored.
        block: rows and columns of a scale, where scales are a grid.
        zero: tensor of what is taken away, one a scale; None for nothing.
        unit: what a scale of 1 stands for.
        beside: further tensors of the layer.
    """

    name: str
    scale: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    block: tuple[int, int]
    zero: str | None = None
    unit: float = 1.0
    beside: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name, self.scale, *(() if self.zero is None else (self.zero,)), *self.beside)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, "float32")

    @property
    def about(self) -> str:
        count = prod(self.scale_shape)
        share = (
            "matrix"
            if count == 1
            else "row"
            if count == self.shape[0]
            else f"block of {self.block[0]} x {self.block[1]}"
        )
        return f"8 bit, a scale for each {share}"

    def _block(self) -> tuple[int, ...] | None:
        """Rows and columns of a scale."""
        grid = tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))
        if self.scale_shape == grid:
            return self.block
        if prod(self.scale_shape) == 1:
            return self.shape
        return (1, self.shape[1]) if self.scale_shape in (self.shape[:1], (self.shape[0], 1)) else None

    def fault(self, tensors: Tensors) -> str | None:
        scales = tensors[self.scale]
        if scales.dtype not in _SCALE_TYPES:
            return f"scales are {scales.dtype}, expected {' or '.join(_SCALE_TYPES)}"
        if len(self.shape) != 2:
            return f"shapes {self.shape} and {self.scale_shape} are not matrices"
        if self._block() is None:
            grid = tuple(-(-size // step) for size, step in zip(self.shape, self.block, strict=True))
            rows = f"{(self.shape[0], 1)} for rows, or one number"
            return f"scales have shape {self.scale_shape}, expected {grid} for blocks {self.block}, {rows}"
        if self.zero is not None and tensors[self.zero] != (self.scale_shape, "int8"):
            return f"{self.zero} is not int8 of shape {self.scale_shape}"
        return None

    def decode(self, read: Read, window: Window) -> np.ndarray:
        block = self._block()
        assert block is not None and len(block) == 2, "checked where the file was opened"
        grid = tuple(-(-size // step) for size, step in zip(self.shape, block, strict=True))
        scales = read(self.scale).reshape(grid).astype(np.float32) * np.float32(self.unit)
        zeros = None if self.zero is None else read(self.zero).reshape(grid).astype(np.float32)
        spans = bounds(window, self.shape)
        values = read(self.name, tuple(slice(*span) for span in spans)).astype(np.float32)
        return scale_blocks(values, scales, zeros, (block[0], block[1]), (spans[0][0], spans[1][0]))


def scale_blocks(
    values: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    block: tuple[int, int],
    origin: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """`(values - zeros) * scales` in place, where `values` begin at `origin` of the matrix that the blocks cut."""
    columns = (origin[1] + np.arange(values.shape[1])) // block[1]
    first, last = origin[0] // block[0], -(-(origin[0] + values.shape[0]) // block[0])
    if scales.shape[1] == 1:  # one step: blocks of a row each would take thousands
        rows = (origin[0] + np.arange(values.shape[0])) // block[0]
        if zeros is not None:
            values -= zeros[rows]
        values *= scales[rows]
        return values
    for index in range(first, last):
        part = values[max(index * block[0] - origin[0], 0) : (index + 1) * block[0] - origin[0]]
        if zeros is not None:
            part -= zeros[index, columns]
        part *= scales[index, columns]
    return values


def find_scaled(
    tensors: Tensors, block: tuple[int, int], dtypes: tuple[str, ...] = FP8
) -> Iterator[tuple[str, ScaledMatrix]]:
    """Those of a checkpoint whose numbers have one of these dtypes, by their names."""
    for name, info in tensors.items():
        scale = next((name + suffix for suffix in _SCALES if name + suffix in tensors), None)
        if info.dtype in dtypes and scale is not None:
            stem, zero = name.removesuffix("weight"), f"{name}_zero_point"
            beside = tuple(stem + part for part in _ROUNDING if stem + part in tensors)
            yield (
                name,
                ScaledMatrix(
                    name,
                    scale,
                    info.shape,
                    tensors[scale].shape,
                    block,
                    zero=zero if zero in tensors else None,
                    beside=beside,
                ),
            )
