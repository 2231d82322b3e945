"""Parameter declarations: what a weight is, where it comes from and how it is cut over the mesh, said once.

A module declares each parameter with `declare`. The loader, dummy weights, sharding specs, the size report and
abstract evaluation all read that declaration; nothing else in the library names a checkpoint tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from flax import nnx

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class Placement:
    """What a module must know to declare its weights.

    Attributes:
        dtype: dtype of the weights and of the activations between blocks.
        tp: devices that split attention heads, dense feed-forward layers and the vocabulary.
        ep: devices that split experts.
    """

    dtype: str = "float32"
    tp: int = 1
    ep: int = 1

    def split(self, field: str, count: int) -> int:
        """`count / tp`.

        Raises:
            InvalidRequest: tp does not divide the count.
        """
        if count % self.tp:
            raise InvalidRequest("tp", self.tp, f"a divisor of {field}={count}")
        return count // self.tp

    def split_kv(self, kv_heads: int) -> int:
        """KV heads that one device holds: an even share, or one that several devices hold a copy of.

        Raises:
            InvalidRequest: neither tp nor kv_heads divides the other.
        """
        if kv_heads % self.tp and self.tp % kv_heads:
            raise InvalidRequest("tp", self.tp, f"a divisor or a multiple of num_key_value_heads={kv_heads}")
        return max(kv_heads // self.tp, 1)


class Assembly(Protocol):
    """Turns a weight's checkpoint tensors into the array that the model uses. Frozen and hashable."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the checkpoint tensors behind a weight of this shape."""
        ...

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        """Writes the weight into `out`, casting on the way."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """The checkpoint tensor as it is."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        out[...] = tensors[0]


@dataclass(frozen=True, slots=True)
class Transposed:
    """`[out, in]` on disk, `[in, out]` in the model."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (shape[::-1],)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        out[...] = tensors[0].T


@dataclass(frozen=True, slots=True)
class OnePlus:
    """`w` on disk, `1 + w` in a float32 weight of the model."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        np.add(tensors[0].astype(np.float32), np.float32(1), out=out, casting="same_kind")

    def take_apart(self, values: np.ndarray) -> list[np.ndarray]:
        """The inverse of `fill`: exact for what the sum in float32 kept."""
        return [values - np.float32(1)]


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One tensor inside a fused weight: `blocks` heads (or 1) of `width` output rows each."""

    blocks: int
    width: int


@dataclass(frozen=True, slots=True)
class Fused:
    """Several `[out_i, in]` tensors side by side in one `[in, out]` weight (or `[out_i]` biases in one `[out]`).

    The columns are ordered by device, so that an even cut over tp leaves each device its share of every part: with
    tp = 2, q, k and v become `q0 k0 v0 q1 k1 v1`. A part with fewer blocks than devices is repeated: with 2 KV heads
    and tp = 4, devices 0 and 1 both hold head 0.
    """

    parts: tuple[FusedPart, ...]
    tp: int

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple((part.blocks * part.width, *shape[:-1]) for part in self.parts)

    def columns(self) -> int:
        """Output columns of the fused weight, copies included."""
        return self.tp * sum(max(part.blocks // self.tp, 1) * part.width for part in self.parts)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        column = 0
        for device in range(self.tp):
            for part, tensor in zip(self.parts, tensors, strict=True):
                count = max(part.blocks // self.tp, 1) * part.width
                start = device * part.blocks // self.tp * part.width
                out[..., column : column + count] = tensor[start : start + count].T
                column += count


@dataclass(frozen=True, slots=True)
class Sections:
    """One tensor that holds the parts of a fused weight one below the other."""

    fused: Fused

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((sum(part.blocks * part.width for part in self.fused.parts), *shape[:-1]),)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        ends = np.cumsum([part.blocks * part.width for part in self.fused.parts])
        self.fused.fill(out, np.split(tensors[0], ends[:-1]))


@dataclass(frozen=True, slots=True)
class Channels:
    """A depthwise filter: `[channels, 1, taps]` on disk, `[taps, channels]` in the model."""

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return ((shape[1], 1, shape[0]),)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        out[...] = tensors[0][:, 0].T


@dataclass(frozen=True, slots=True)
class Stacked:
    """`count` weights of the same kind, one after another in the first axis."""

    each: Assembly
    count: int

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return self.each.source_shapes(shape[1:]) * self.count

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        parts = len(tensors) // self.count
        for index in range(self.count):
            self.each.fill(out[index], tensors[index * parts : (index + 1) * parts])


@dataclass(frozen=True, slots=True)
class Deinterleaved:
    """Even places of an axis first, then the odd ones: `g0 u0 g1 u1` on disk, `g0 g1 u0 u1` in the model."""

    axis: int

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        source, target = np.moveaxis(tensors[0], self.axis, 0), np.moveaxis(out, self.axis, 0)
        half = len(target) // 2
        target[:half], target[half:] = source[0::2], source[1::2]


@dataclass(frozen=True, slots=True)
class Init:
    """Distribution of dummy weights: `mean + std * normal`. The defaults keep activations near unit scale.

    Attributes:
        stored_mean: mean of the checkpoint's numbers where the weight holds others; None for the same.
    """

    std: float
    mean: float = 0.0
    stored_mean: float | None = None


@dataclass(frozen=True, slots=True)
class ByteInit(Init):
    """Of every byte of an integer weight, cut to 0 to 255."""


# Biases, and whatever else a model adds where zero would change nothing.
BIAS = Init(std=0.3)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One weight.

    Attributes:
        shape: global shape.
        dtype: dtype on the device.
        partition: mesh axis that cuts each dimension, or None.
        sources: checkpoint tensors, in the order that the assembly takes them.
        assembly: how they combine.
        init: distribution of dummy values.
        flops_per_token: multiply-adds a token times two; 0 for lookups and norms.
        token_share: share of the weight that one token reads: 1, a row of a table, k of E experts.
        parameters: numbers behind the weight; None for one an element.
        stored_dtype: of the checkpoint's tensors, where it is not any float; None for any float.
    """

    shape: tuple[int, ...]
    dtype: str
    partition: tuple[str | None, ...]
    sources: tuple[str, ...]
    assembly: Assembly
    init: Init
    flops_per_token: int
    token_share: float = 1.0
    parameters: int | None = None
    stored_dtype: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes over all devices, each cut counted once."""
        return int(np.prod(self.shape)) * jax.dtypes.canonicalize_dtype(self.dtype).itemsize

    def touched_nbytes(self, tokens: int) -> float:
        """Bytes that a step of so many tokens is expected to read, each counted once, if tokens choose at random."""
        return self.nbytes * (1 - (1 - self.token_share) ** tokens)


class Weight(nnx.Param):
    """A parameter whose metadata holds its `declaration`; abstract until a loader gives it a value."""

    declaration: Declaration


def declare(
    shape: Sequence[int],
    placement: Placement,
    sources: str | Sequence[str],
    *,
    assembly: Assembly | None = None,
    partition: Sequence[str | None] | None = None,
    init: Init | None = None,
    dtype: str | None = None,
    flops_per_token: int | None = None,
    token_share: float = 1.0,
    parameters: int | None = None,
    stored_dtype: str | None = None,
) -> Weight:
    """Declares one weight.

    Args:
        shape: global shape; matrices are `[in, out]`.
        placement: dtype and mesh sizes.
        sources: checkpoint tensor names.
        assembly: how they combine; None takes the tensor as it is.
        partition: mesh axis a dimension; None replicates.
        init: dummy values; None takes std 1/sqrt(in) for matrices and ones for vectors.
        dtype: None takes the placement's.
        flops_per_token: None counts two for each number of a matrix; weights that are only indexed, or of which a
            token uses a part, say what they cost.
        token_share: share of the weight that one token reads.
        parameters: numbers behind a packed weight; None counts its elements.
        stored_dtype: the only dtype that its tensors may have; None takes any float.
    """
    shape = tuple(shape)
    matrix = len(shape) >= 2
    if flops_per_token is None:
        flops_per_token = 2 * int(np.prod(shape)) if matrix else 0
    if init is None:
        init = Init(std=shape[-2] ** -0.5) if matrix else Init(std=0.0, mean=1.0)
    declaration = Declaration(
        shape=shape,
        dtype=dtype or placement.dtype,
        partition=tuple(partition) if partition is not None else (None,) * len(shape),
        sources=(sources,) if isinstance(sources, str) else tuple(sources),
        assembly=assembly or Same(),
        init=init,
        flops_per_token=flops_per_token,
        token_share=token_share,
        parameters=parameters,
        stored_dtype=stored_dtype,
    )
    return Weight(jax.ShapeDtypeStruct(shape, declaration.dtype), declaration=declaration)
