"""Parameter declarations: what a weight is, where it comes from and what its dimensions count, said once.

A module declares each parameter with `declare`. The loader, dummy weights, sharding specs, the size report and
abstract evaluation all read that declaration; nothing else in the library names a checkpoint tensor. A declaration
knows no mesh: how a mesh cuts the weight follows from the axes of its dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from resin.models.assemblies import Assembly, Same, Shape
from resin.models.axes import RULES, Axes, Axis
from resin.models.loading.checkpoint import Window
from resin.plan.mapping import FrozenMapping
from resin.topology import MeshShape

Memory = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Placement:
    """What a module must know to declare its weights.

    Attributes:
        dtype: dtype of the weights and of the activations between blocks.
        mesh: devices that share them.
    """

    dtype: str = "float32"
    mesh: MeshShape = MeshShape()  # noqa: RUF009 (frozen)

    def split(self, field: str, count: int, axis: Axis) -> int:
        """What one device holds of so many.

        Args:
            field: what is counted, as the model's config names it.
            axis: what that is, by whose rule devices share it.

        Raises:
            InvalidRequest: the devices that share it do not divide the count.
        """
        return self.mesh.split(field, count, RULES[axis])

    def split_kv(self, kv_heads: int) -> int:
        """KV heads that one device holds: an even share, or one that several devices hold a copy of.

        Raises:
            InvalidRequest: neither tp nor kv_heads divides the other.
        """
        return self.mesh.split_kv(kv_heads)


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


class Piece(NamedTuple):
    """A part of a device's share, and the window of the weight that it is."""

    share: Window
    weight: Window


@dataclass(frozen=True, slots=True)
class Declaration:
    """One weight.

    Attributes:
        shape: of the whole weight, whatever the mesh.
        dtype: dtype on the device.
        axes: what each dimension counts, where devices may share it. The dimension after `Axis.KV` holds that head's
            queries, then its key and its value.
        sources: checkpoint tensors, in the order that the assembly takes them.
        assembly: how they combine.
        init: distribution of dummy values.
        inner: values that each output of a matrix sums; 0 for what is no matrix.
        flops_per_token: multiply-adds a token times two; 0 for lookups and norms.
        token_share: share of the weight that one token reads: 1, a row of a table, k of E experts.
        parameters: numbers behind the weight; None for one an element.
        stored_dtype: of the checkpoint's tensors, where it is not any float; None for any float.
        memory: where it stays: on the device, or in pinned memory of its host.
    """

    shape: Shape
    dtype: str
    axes: tuple[Axis | None, ...]
    sources: tuple[str, ...]
    assembly: Assembly
    init: Init
    inner: int
    flops_per_token: int
    token_share: float = 1.0
    parameters: int | None = None
    stored_dtype: str | None = None
    memory: Memory = "device"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self._nbytes(self.shape)

    def device_nbytes(self, mesh: Mesh) -> int:
        """Bytes that it takes in a device's own memory."""
        if self.memory == "host":
            return 0
        return self._nbytes(self.sharding(mesh).shard_shape(self.placed_shape(mesh)))

    def _nbytes(self, shape: Shape) -> int:
        return int(np.prod(shape)) * jax.dtypes.canonicalize_dtype(self.dtype).itemsize

    def spec(self, mesh: Mesh) -> PartitionSpec:
        """How a mesh cuts it."""
        axes = axes_of(mesh)
        return PartitionSpec(*(None if axis is None else axes.mesh_axes(axis) or None for axis in self.axes))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The same, and in which memory."""
        return NamedSharding(mesh, self.spec(mesh), memory_kind="pinned_host" if self.memory == "host" else None)

    def placed_shape(self, mesh: Mesh) -> Shape:
        """The global shape on a mesh: the weight's, unless more devices share its KV heads than there are.

        Each device then has some of a head's queries, with a copy of its key and its value.
        """
        if Axis.KV not in self.axes:
            return self.shape
        place, devices = self.axes.index(Axis.KV), axes_of(mesh).size(Axis.KV)
        heads, members = self.shape[place : place + 2]
        if heads % devices == 0:
            return self.shape
        queries = (members - 2) * heads // devices
        return (*self.shape[:place], devices, queries + 2, *self.shape[place + 2 :])

    def without_copies(self, mesh: Mesh) -> Declaration:
        """The same weight, whole on every device along dimensions that the mesh does not divide."""
        count = axes_of(mesh).size
        fits = (axis is not None and size % count(axis) == 0 for axis, size in zip(self.axes, self.shape, strict=True))
        return replace(self, axes=tuple(axis if fit else None for axis, fit in zip(self.axes, fits, strict=True)))

    def pieces(self, placed_shape: Shape, window: Window) -> list[Piece]:
        """What a window of the array on the mesh is made of; a piece's share counts from the window's start."""
        everything = tuple(slice(0, part.stop - part.start) for part in window)
        if placed_shape == self.shape:
            return [Piece(everything, window)]
        place = self.axes.index(Axis.KV)
        (heads, members), (devices, held) = self.shape[place : place + 2], placed_shape[place : place + 2]
        pieces = []
        for index, device in enumerate(range(window[place].start, window[place].stop)):
            copies, queries = devices // heads, held - 2
            first = device % copies * queries
            for here, there in (
                (slice(0, queries), slice(first, first + queries)),
                (slice(queries, held), slice(members - 2, members)),
            ):
                head = device // copies
                pieces.append(
                    Piece(
                        (*everything[:place], slice(index, index + 1), here, *everything[place + 2 :]),
                        (*window[:place], slice(head, head + 1), there, *window[place + 2 :]),
                    )
                )
        return pieces

    def touched_nbytes(self, tokens: int) -> float:
        """Bytes that a step of so many tokens is expected to read, each counted once, if tokens choose at random."""
        return self.nbytes * (1 - (1 - self.token_share) ** tokens)


def axes_of(mesh: Mesh) -> Axes:
    """The axes of a pass over a mesh, on which each replica has tokens of its own."""
    return Axes(FrozenMapping(dict(mesh.shape)), tokens=("dp",))


class Weight(nnx.Param):
    """A parameter whose metadata holds its `declaration`; abstract until a loader gives it a value."""

    declaration: Declaration


def declare(
    shape: Sequence[int],
    placement: Placement,
    sources: str | Sequence[str],
    *,
    assembly: Assembly | None = None,
    axes: Sequence[Axis | None] | None = None,
    init: Init | None = None,
    dtype: str | None = None,
    inner: int | None = None,
    flops_per_token: int | None = None,
    token_share: float = 1.0,
    parameters: int | None = None,
    stored_dtype: str | None = None,
    memory: Memory = "device",
) -> Weight:
    """Declares one weight.

    Args:
        shape: of the whole weight; matrices are `[in, out]`, stacks of them `[count, in, out]`.
        placement: dtype.
        sources: checkpoint tensor names.
        assembly: how they combine; None takes the tensor as it is.
        axes: what each dimension counts, where devices may share it; None for a copy on each.
        init: dummy values; None takes std 1/sqrt(inner) for matrices and ones for vectors.
        dtype: None takes the placement's.
        inner: values that each output sums; None takes the dimension before the last, and 0 says that it is no matrix.
        flops_per_token: None counts two for each number of a matrix; weights that are only indexed, or of which a
            token uses a part, say what they cost.
        token_share: share of the weight that one token reads.
        parameters: numbers behind a packed weight; None counts its elements.
        stored_dtype: the only dtype that its tensors may have; None takes any float.
        memory: where it stays.
    """
    shape = tuple(shape)
    if inner is None:
        inner = shape[-2] if len(shape) >= 2 else 0
    if flops_per_token is None:
        flops_per_token = 2 * int(np.prod(shape)) if inner else 0
    if init is None:
        init = Init(std=inner**-0.5) if inner else Init(std=0.0, mean=1.0)
    declaration = Declaration(
        shape=shape,
        dtype=dtype or placement.dtype,
        axes=tuple(axes) if axes is not None else (None,) * len(shape),
        sources=(sources,) if isinstance(sources, str) else tuple(sources),
        assembly=assembly or Same(),
        init=init,
        inner=inner,
        flops_per_token=flops_per_token,
        token_share=token_share,
        parameters=parameters,
        stored_dtype=stored_dtype,
        memory=memory,
    )
    return Weight(jax.ShapeDtypeStruct(shape, declaration.dtype), declaration=declaration)
