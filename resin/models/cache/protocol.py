"""What a layer asks of a cache. T tokens, H query heads, K KV heads, D head size: all of one device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import jax

from resin.models.cache.attended import Attended


@dataclass(frozen=True, slots=True)
class PlaneRef:
    """Rows of a cache group's plane: where one layer keeps what it keeps. Layers that name the same rows share them.

    Attributes:
        group: cache group.
        plane: its plane.
        row: first row.
        rows: vectors an entry (of a State: of the state).
        width: values a vector.
    """

    group: str
    plane: str
    row: int
    rows: int
    width: int

    @staticmethod
    def of_layer(group: str, plane: str, index: int, rows: int, width: int) -> PlaneRef:
        """The rows of layer `index` of a plane that gives every layer the same number of them."""
        return PlaneRef(group, plane, index * rows, rows, width)

    def halves(self) -> tuple[PlaneRef, PlaneRef]:
        """The first and the second half of the rows: keys and values of a plane that holds both."""
        half = self.rows // 2
        return replace(self, rows=half), replace(self, row=self.row + half, rows=half)


@dataclass(frozen=True, slots=True)
class Attend:
    """How queries attend.

    Attributes:
        scale: factor on the scores.
        window: keys that a query sees, itself included; None for all.
        softcap: `softcap * tanh(score / softcap)`; None for no cap.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class AppendTarget(NamedTuple):
    """What a kernel needs that puts new entries in their place itself.

    Attributes:
        arena: [num_pages, page_elements].
        pages, offsets: int32 [T], page and entry that take each token; page 0 takes nothing.
        key_row, value_row: vectors from a page's start to the first row of keys and of values.
        page_entries: entries a page, the stride between two rows.
        fp8_scale: of 8-bit floats; None if the values are the arena's own.
        wants_vectors: whether keys and values are asked for as arrays as well.
    """

    arena: jax.Array
    pages: jax.Array
    offsets: jax.Array
    key_row: int
    value_row: int
    page_entries: int
    fp8_scale: float | None
    wants_vectors: bool


class Heads(NamedTuple):
    """Heads of new tokens, ready to attend.

    Attributes:
        query: [T, H, D].
        key, value: [T, K, D]; None where only the arena has them.
        arena: what became of the target's, with keys and values in their place; None where nothing was written.
    """

    query: jax.Array
    key: jax.Array | None
    value: jax.Array | None
    arena: jax.Array | None = None


class Cache(Protocol):
    """What one forward pass reads of earlier tokens and leaves for later ones.

    Every token's entry is written before any layer attends to it: a query sees itself and what came before.
    """

    def append(self, plane: PlaneRef, vectors: jax.Array) -> None:
        """Keeps `[T, rows, width]` vectors, an entry for each token."""
        ...

    def target(self, plane: PlaneRef, how: Attend, sinks: jax.Array | None) -> AppendTarget | None:
        """Where a kernel may append keys and values itself, those of `plane.halves()`; None where it may not.

        Args:
            plane: keys and values.
            how, sinks: of the attention that follows.
        """
        ...

    def append_heads(self, plane: PlaneRef, heads: Heads) -> None:
        """Keeps keys and values, those of `plane.halves()`, unless a kernel has appended them already."""
        ...

    def attend(
        self,
        query: jax.Array,
        keys: PlaneRef,
        values: PlaneRef,
        how: Attend,
        *,
        sinks: jax.Array | None = None,
        with_lse: bool = False,
    ) -> Attended:
        """Attends causally to the keys of each query's sequence, its own included.

        Args:
            query: [T, H, D].
            keys, values: K rows of what `append` has kept.
            how: scale and mask.
            sinks: [H] logits that only add to the denominator, where these keys are all that there are; beside others,
                `merge` takes them.
            with_lse: tell the log of the denominators, for `merge`.
        """
        ...

    def read_state(self, state: PlaneRef, dtype: jax.typing.DTypeLike) -> jax.Array:
        """`[B, rows, width]` in a dtype, what earlier tokens of each sequence left; zeros at its start."""
        ...

    def write_state(self, state: PlaneRef, value: jax.Array) -> None:
        """Leaves `[B, rows, width]` for each sequence's later tokens."""
        ...

    def shift_state(self, state: PlaneRef, x: jax.Array) -> list[jax.Array]:
        """The inputs before each token, of a State that holds the last ones of its sequence, which it moves on.

        Args:
            state: a row for each input, the oldest first.
            x: [T, width].

        Returns:
            `rows` arrays [T, width], the input `rows` tokens ago first; zeros before the sequence's start.
        """
        ...
