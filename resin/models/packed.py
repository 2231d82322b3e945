"""MXFP4 matrices of experts as weights: what is declared of them, and how a checkpoint's tensors become them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flax import nnx

from resin.models.assemblies import Tensor
from resin.models.axes import Axis
from resin.models.declare import ByteInit, Init, Placement, declare
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


class PackedExpertMatrix(nnx.Module):
    """One `[in, out]` matrix an expert in a quarter of bfloat16's bytes, decoded as it is used.

    Args:
        placement: mesh.
        name: checkpoint prefix of `_blocks` and `_scales`.
        experts: E.
        shape: in and out, multiples of 32 and 16.
        interleaved: the checkpoint's rows are gate and up in turn; the product has gates, then ups.
        flops_per_token, token_share: as `declare` takes them.

    Raises:
        InvalidRequest: a size that the packing cannot cut.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        experts: int,
        shape: tuple[int, int],
        *,
        interleaved: bool,
        flops_per_token: int,
        token_share: float,
    ) -> None:
        self.inner, outer = shape
        if self.inner % GROUP_VALUES:
            raise InvalidRequest(f"input of {name}", self.inner, f"a multiple of {GROUP_VALUES}, the values of a scale")
        if outer % TILE_ROWS:
            raise InvalidRequest(f"output of {name}", outer, f"a multiple of {TILE_ROWS}, the rows of a tile")
        rows = PackedRows(self.inner, interleaved)
        words, factors, units = packed_shapes(experts, outer, self.inner)
        scale = 127 - math.log2(E2M1_STD * self.inner**0.5)
        self.words = declare(
            words,
            placement,
            f"{name}_blocks",
            assembly=Words(rows),
            axes=(Axis.EXPERTS, None, None, None),
            dtype="int32",
            stored_dtype="uint8",
            init=ByteInit(mean=127.5, std=74.0),
            flops_per_token=flops_per_token,
            token_share=token_share,
            parameters=experts * outer * self.inner,
        )
        self.factors = declare(
            factors,
            placement,
            f"{name}_scales",
            assembly=Factors(rows),
            axes=(Axis.EXPERTS, None, None, None),
            dtype="int32",
            stored_dtype="uint8",
            init=ByteInit(mean=scale + FACTOR_OF_SCALE, std=0.7, stored_mean=scale),
            flops_per_token=0,
            token_share=token_share,
            parameters=0,
        )
        self.units = declare(
            units,
            placement,
            f"{name}_scales",
            assembly=Units(outer, rows),
            axes=(Axis.EXPERTS,),
            dtype="float32",
            stored_dtype="uint8",
            init=Init(std=0.0, mean=1.0),
            flops_per_token=0,
            token_share=token_share,
            parameters=0,
        )

    def operand(self) -> PackedMatrices:
        """E of `[out, in]`."""
        return PackedMatrices(self.words[...], self.factors[...], self.units[...])
