"""How checkpoint tensors become a weight: assemblies, which fill any window of it from what the window needs.

A linear layer's matrix is `[out, in]` on disk and `[in, out]` in the model. Outputs that devices share by something
else than their place keep that in dimensions of their own: `[in, 2, out]` is gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from resin.models.loading.checkpoint import Window

Shape = tuple[int, ...]


class Tensor(Protocol):
    """A checkpoint tensor that is read window by window; an array is one."""

    def __getitem__(self, window: Any, /) -> np.ndarray: ...


class Assembly(Protocol):
    """Turns a weight's checkpoint tensors into the array that the model uses. Frozen and hashable.

    One that changes numbers has a method `take_apart(values)` as well, which gives the tensors back.
    """

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Shapes of the checkpoint tensors behind a weight of this shape."""
        ...

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        """Writes a window of the weight into `out`, casting on the way, and reads no more than that takes."""
        ...


def whole(shape: Shape) -> Window:
    """The window that is all of an array."""
    return tuple(slice(0, size) for size in shape)


def window_shape(window: Window) -> Shape:
    """Of the array in a window."""
    return tuple(part.stop - part.start for part in window)


@dataclass(frozen=True, slots=True)
class Same:
    """The checkpoint tensor as it is."""

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        out[...] = tensors[0][window]


@dataclass(frozen=True, slots=True)
class Transposed:
    """`[out, in]` on disk, `[in, out]` in the model."""

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape[::-1],)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        out[...] = tensors[0][window[::-1]].T


@dataclass(frozen=True, slots=True)
class OnePlus:
    """`w` on disk, `1 + w` in a float32 weight of the model."""

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        np.add(tensors[0][window].astype(np.float32), np.float32(1), out=out, casting="same_kind")

    def take_apart(self, values: np.ndarray) -> list[np.ndarray]:
        """The inverse of `fill`: exact for what the sum in float32 kept."""
        return [values - np.float32(1)]


@dataclass(frozen=True, slots=True)
class Joined:
    """`parts` matrices of one input, `[out, in]` each, in one `[in, parts, out]`; or biases in `[parts, out]`."""

    parts: int

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        *inner, _, out = shape
        return ((out, *inner),) * self.parts

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        *inner, parts, rows = window
        for place, part in enumerate(range(parts.start, parts.stop)):
            out[..., place, :] = tensors[part][rows, *inner].T


@dataclass(frozen=True, slots=True)
class JoinedHeads:
    """q, k and v, `[heads * width, in]` each, in one `[in, kv_heads, q_per_kv + 2, width]`, or so without `in`.

    Each KV head has its queries beside it, then its key, then its value. `lanes` puts the numbers of queries and keys
    in another order, as `Rope.lanes` says.
    """

    kv_heads: int
    q_per_kv: int
    width: int
    lanes: tuple[int, ...] | None = None

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        *inner, _, _, _ = shape
        kv = self.kv_heads * self.width
        return (kv * self.q_per_kv, *inner), (kv, *inner), (kv, *inner)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        *inner, groups, members, lanes = window
        for place, group in enumerate(range(groups.start, groups.stop)):
            for seat, member in enumerate(range(members.start, members.stop)):
                is_query = member < self.q_per_kv
                head = group * self.q_per_kv + member if is_query else group
                tensor = tensors[0] if is_query else tensors[1 + member - self.q_per_kv]
                order = self.lanes if member <= self.q_per_kv else None
                out[..., place, seat, :] = _head(tensor, head * self.width, lanes, inner, order).T


def _head(
    tensor: Tensor, start: int, lanes: slice, inner: Sequence[slice], order: tuple[int, ...] | None
) -> np.ndarray:
    """A window of the rows of one head, which begins at `start`."""
    if order is None:
        return tensor[slice(start + lanes.start, start + lanes.stop), *inner]
    wanted = np.array(order[lanes])
    least = int(wanted.min())
    return tensor[slice(start + least, start + int(wanted.max()) + 1), *inner][wanted - least]


@dataclass(frozen=True, slots=True)
class Reordered:
    """Entry `order[i]` of each vector on disk in place i of the model's; vectors lie along the last axis."""

    order: tuple[int, ...]

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (shape,)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        *lead, lanes = window
        wanted = np.array(self.order[lanes])
        least = int(wanted.min())
        out[...] = tensors[0][*lead, slice(least, int(wanted.max()) + 1)][..., wanted - least]


@dataclass(frozen=True, slots=True)
class Sections:
    """One tensor that holds those of another assembly one below the other, `heights` rows each."""

    each: Assembly
    heights: tuple[int, ...]

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return ((sum(self.heights), *self.each.source_shapes(shape)[0][1:]),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        starts = [sum(self.heights[:place]) for place in range(len(self.heights))]
        self.each.fill(out, [_Below(tensors[0], start) for start in starts], window)


@dataclass(frozen=True, slots=True)
class _Below:
    """A tensor from one of its rows on."""

    tensor: Tensor
    start: int

    def __getitem__(self, window: Window, /) -> np.ndarray:
        rows, *others = window
        return self.tensor[slice(self.start + rows.start, self.start + rows.stop), *others]


@dataclass(frozen=True, slots=True)
class Channels:
    """A depthwise filter: `[channels, 1, taps]` on disk, `[taps, channels]` in the model."""

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return ((shape[1], 1, shape[0]),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        taps, channels = window
        out[...] = tensors[0][channels, slice(0, 1), taps][:, 0].T


@dataclass(frozen=True, slots=True)
class Stacked:
    """`count` weights of the same kind, one after another in the first axis."""

    each: Assembly
    count: int

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return self.each.source_shapes(shape[1:]) * self.count

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        parts = len(tensors) // self.count
        for place, index in enumerate(range(window[0].start, window[0].stop)):
            self.each.fill(out[place], tensors[index * parts : (index + 1) * parts], window[1:])


@dataclass(frozen=True, slots=True)
class Piled:
    """One tensor that holds the one tensor of each of `count` weights, one after another in the first axis."""

    each: Assembly
    count: int

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        (one,) = self.each.source_shapes(shape[1:])
        return ((self.count, *one),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        for place, index in enumerate(range(window[0].start, window[0].stop)):
            self.each.fill(out[place], [_Sheet(tensors[0], index)], window[1:])


@dataclass(frozen=True, slots=True)
class _Sheet:
    """One place of a tensor's first axis."""

    tensor: Tensor
    index: int

    def __getitem__(self, window: Window, /) -> np.ndarray:
        return self.tensor[slice(self.index, self.index + 1), *window][0]


@dataclass(frozen=True, slots=True)
class Deinterleaved:
    """Even and odd places of the last axis apart: `[g0 u0 g1 u1]` on disk, `[[g0 g1], [u0 u1]]` in the model."""

    def source_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return ((*shape[:-2], prod(shape[-2:])),)

    def fill(self, out: np.ndarray, tensors: Sequence[Tensor], window: Window) -> None:
        *lead, halves, places = window
        pairs = tensors[0][*lead, slice(2 * places.start, 2 * places.stop)]
        for place, half in enumerate(range(halves.start, halves.stop)):
            out[..., place, :] = pairs[..., half::2]
