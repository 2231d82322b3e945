"""MXFP4 matrices of experts as weights: what is declared of them, and how a checkpoint's tensors become them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resin.models.assemblies import Tensor
from resin.models.declare import ByteInit, Init, Placement, Weight, declare
from resin.models.linear import Matrices
from resin.models.loading.checkpoint import Window
from resin.pallas_kernels.mxfp4 import (
    BLOCK_BYTES,
    GROUP_VALUES,
    TILE_ROWS,
    PackedMatrices,
    pack_factors,
    pack_words,
    packed_shapes,
    scale_shift,
    unpack_factors,
    unpack_matrices,
    unpack_words,
)
from resin.plan import InvalidRequest

E2M1_STD = 2.93  # of the sixteen values, each as likely
FACTOR_OF_SCALE = 126  # what a scale's byte becomes as a factor's


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a checkpoint's matrices in the order of tiles.

    Attributes:
        inner: values a row.
        interleaved: rows are gate and up in turn; a tile takes eight gates, then their ups.
    """

    inner: int
    interleaved: bool

    def arrange(self, tensor: np.ndarray) -> np.ndarray:
        """One matrix's blocks or scales, `[rows, ...]`."""
        if not self.interleaved:
            return tensor
        pairs = tensor.reshape(-1, 8, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    def restore(self, tensor: np.ndarray) -> np.ndarray:
        """The inverse of `arrange`."""
        if not self.interleaved:
            return tensor
        pairs = tensor.reshape(-1, 2, 8, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    def groups(self) -> int:
        """Scales a row."""
        return self.inner // GROUP_VALUES


@dataclass(frozen=True, slots=True)
class Words:
    """uint8 blocks `[E, rows, K / 32, 16]` to `PackedMatrices.words`."""

    rows: PackedRows

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((shape[0], shape[1] * TILE_ROWS, self.rows.groups(), BLOCK_BYTES),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        for expert, blocks in enumerate(tensors[0][window[:1]]):
            out[expert] = pack_words(self.rows.arrange(blocks))[window[1:]]

    def take_apart(self, values: np.ndarray) -> list[np.ndarray]:
        """The inverse of `fill`."""
        groups = self.rows.groups()
        return [np.stack([self.rows.restore(unpack_words(words, groups)) for words in values])]


@dataclass(frozen=True, slots=True)
class Factors:
    """uint8 scales `[E, rows, K / 32]` to `PackedMatrices.factors`."""

    rows: PackedRows

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((shape[0], shape[1] * TILE_ROWS, self.rows.groups()),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        for expert, scales in enumerate(tensors[0][window[:1]]):
            out[expert] = pack_factors(self.rows.arrange(scales))[window[1:]]

    def take_apart(self, values: np.ndarray) -> list[np.ndarray]:
        """The inverse of `fill` for matrices of unit 1."""
        groups = self.rows.groups()
        return [np.stack([self.rows.restore(unpack_factors(factors, groups)) for factors in values])]


@dataclass(frozen=True, slots=True)
class Units:
    """The same scales to `PackedMatrices.units`."""

    count: int  # rows of a matrix
    rows: PackedRows

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((shape[0], self.count, self.rows.groups()),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        for expert, scales in enumerate(tensors[0][window[:1]]):
            out[expert] = 2.0 ** scale_shift(scales)


@dataclass(frozen=True, slots=True)
class Mxfp4Tiles:
    """Four bits a number in the order of `PackedMatrices`, decoded as it is used: a `Format` of stacks.

    Attributes:
        interleaved: the checkpoint's rows are gate and up in turn, the product has them in turns of eight.
    """

    interleaved: bool

    def declare(self, placement: Placement, matrices: Matrices) -> dict[str, Weight]:
        """Raises:
        InvalidRequest: a size that the packing cannot cut.
        """
        (name, *_), inner, outer, experts = matrices.sources, matrices.inner, matrices.outer, matrices.shape[0]
        if inner % GROUP_VALUES:
            raise InvalidRequest(f"input of {name}", inner, f"a multiple of {GROUP_VALUES}, the values of a scale")
        if outer % TILE_ROWS:
            raise InvalidRequest(f"output of {name}", outer, f"a multiple of {TILE_ROWS}, the rows of a tile")
        rows = PackedRows(inner, self.interleaved)
        words, factors, units = packed_shapes(experts, outer, inner)
        scale = 127 - math.log2(E2M1_STD * inner**0.5)
        shared: dict[str, Any] = {
            "stored_dtype": "uint8",
            "token_share": matrices.token_share,
            "memory": matrices.memory,
        }
        axis = matrices.axes[0]
        return {
            "words": declare(
                words,
                placement,
                f"{name}_blocks",
                assembly=Words(rows),
                axes=(axis, None, None, None),
                dtype="int32",
                init=ByteInit(mean=127.5, std=74.0),
                inner=inner,
                flops_per_token=matrices.flops_per_token,
                parameters=experts * outer * inner,
                **shared,
            ),
            "factors": declare(
                factors,
                placement,
                f"{name}_scales",
                assembly=Factors(rows),
                axes=(axis, None, None, None),
                dtype="int32",
                init=ByteInit(mean=scale + FACTOR_OF_SCALE, std=0.7, stored_mean=scale),
                inner=0,
                parameters=0,
                **shared,
            ),
            "units": declare(
                units,
                placement,
                f"{name}_scales",
                assembly=Units(outer, rows),
                axes=(axis,),
                dtype="float32",
                init=Init(std=0.0, mean=1.0),
                parameters=0,
                **shared,
            ),
        }

    def operand(self, weights: dict[str, jax.Array], is_stack: bool) -> PackedMatrices:
        return PackedMatrices(weights["words"], weights["factors"], weights["units"])

    def decode(self, operand: PackedMatrices, inner: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`[E, in, out]`, gates then ups."""
        rows = unpack_matrices(operand, inner, jnp.dtype(dtype))
        if self.interleaved:
            rows = rows.reshape(len(rows), -1, 2, 8, inner).swapaxes(1, 2).reshape(rows.shape)
        return rows.swapaxes(1, 2)
