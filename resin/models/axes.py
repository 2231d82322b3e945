"""Logical axes of weights and activations, and which axes of the device mesh cut them.

A weight says what its dimensions are; one table says where they are cut. Inside a shard_map, `Axes` holds the
collectives that follow from it, so that no layer names an axis of the mesh.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax import lax

from resin.plan.mapping import FrozenMapping
from resin.topology import MESH_AXES


class Axis(enum.StrEnum):
    """What a dimension counts, where devices may share it."""

    HEADS = "heads"
    """Query heads."""
    KV = "kv"
    """KV heads, each with its query heads."""
    FFN = "ffn"
    """Inner width of a dense feed-forward layer."""
    EXPERTS = "experts"
    """Experts, by their index."""
    VOCAB = "vocab"
    """Token ids."""
    CHANNELS = "channels"
    """Channels of a layer that mixes tokens channel by channel."""


RULES: Mapping[Axis, tuple[str, ...]] = FrozenMapping({axis: ("tp",) for axis in Axis} | {Axis.EXPERTS: MESH_AXES})
"""Mesh axes that cut each logical axis, the outermost first: experts lie on all devices, everything else along `tp`."""


@dataclass(frozen=True, slots=True)
class Axes:
    """How one forward pass is cut over the mesh.

    Attributes:
        sizes: devices of each mesh axis; an axis that is not named has one.
        rules: mesh axes of each logical axis.
        tokens: mesh axes whose devices hold different tokens. Over all others activations are whole between layers.
    """

    sizes: Mapping[str, int] = FrozenMapping({})
    rules: Mapping[Axis, tuple[str, ...]] = RULES
    tokens: tuple[str, ...] = ()

    def mesh_axes(self, axis: Axis) -> tuple[str, ...]:
        """Mesh axes of more than one device that cut a logical axis."""
        return tuple(name for name in self.rules[axis] if self.sizes.get(name, 1) > 1)

    def size(self, axis: Axis) -> int:
        """Devices that share a logical axis."""
        return math.prod(self.sizes[name] for name in self.mesh_axes(axis))

    def index(self, axis: Axis) -> jax.Array | int:
        """This device's place among them."""
        names = self.mesh_axes(axis)
        return lax.axis_index(names) if names else 0

    def enter(self, x: jax.Array, axis: Axis) -> jax.Array:
        """`[T, ...]` of every token that the devices which share `axis` hold between them."""
        names = tuple(name for name in self.mesh_axes(axis) if name in self.tokens)
        return lax.all_gather(x, names, axis=0, tiled=True) if names else x

    def leave(self, partial: jax.Array, axis: Axis) -> jax.Array:
        """Sums the devices' products `[T, ...]` over their shares of `axis`; each keeps the tokens that are its own."""
        scattered = tuple(name for name in self.mesh_axes(axis) if name in self.tokens)
        summed = tuple(name for name in self.mesh_axes(axis) if name not in self.tokens)
        if scattered:
            partial = lax.psum_scatter(partial, scattered, scatter_dimension=0, tiled=True)
        return lax.psum(partial, summed) if summed else partial

    def total(self, partial: jax.Array, axis: Axis) -> jax.Array:
        """The sum of what the devices that share `axis` hold, on each of them."""
        names = self.mesh_axes(axis)
        return lax.psum(partial, names) if names else partial

    def join(self, share: jax.Array, axis: Axis) -> jax.Array:
        """Sets the devices' shares of the last dimension side by side."""
        names = self.mesh_axes(axis)
        return lax.all_gather(share, names, axis=share.ndim - 1, tiled=True) if names else share

    def exchange(self, share: jax.Array, axis: Axis) -> jax.Array:
        """`[R, n]` of every row becomes `[R / devices, all n]` of this device's rows: shares of columns for rows."""
        names = self.mesh_axes(axis)
        return lax.all_to_all(share, names, split_axis=0, concat_axis=share.ndim - 1, tiled=True) if names else share

    def own_rows(self, x: jax.Array, axis: Axis) -> jax.Array:
        """This device's share of rows that all who share `axis` hold."""
        held = x.shape[0] // self.size(axis)
        return lax.dynamic_slice_in_dim(x, self.index(axis) * held, held)

    def gather_rows(self, share: jax.Array, axis: Axis) -> jax.Array:
        """The devices' shares of the rows, one below the other."""
        names = self.mesh_axes(axis)
        return lax.all_gather(share, names, axis=0, tiled=True) if names else share


NOT_CUT = Axes()
"""Of one device."""
