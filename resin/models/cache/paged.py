"""The cache of a plan: many sequences packed, what they keep in the arena's pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from resin.models.cache.attended import Attended
from resin.models.cache.planes import PlaneRows, check_plane, first_row, plane_rows
from resin.models.cache.protocol import AppendTarget, Attend, Heads, PlaneRef
from resin.models.cache.shift import shift_chunks
from resin.models.tokens import Tokens
from resin.pallas_kernels.counters import Counters
from resin.pallas_kernels.fresh_prefill import fits_fresh_prefill
from resin.pallas_kernels.rope_append import append_rows
from resin.pallas_kernels.shift_state import read_states, write_states
from resin.pallas_kernels.table import Kernels
from resin.plan import (
    CacheGeometry,
    CacheGroup,
    HistoryGroup,
    InvalidRequest,
    Phase,
    RowFlag,
    StateGroup,
)


class PagedCache:
    """A plan's columns, unpacked, and the arena as it changes from layer to layer.

    A fresh plan is one sequence from its start: its tokens are all the keys there are, so that layers whose options
    allow it attend to them directly. The arena gets them for the steps that follow.

    Args:
        phase: prefill or decode.
        columns: the plan's columns by name, as `plan_layout` names them, and those derived from them.
        tokens: of the plan.
        arena: [num_pages, page_elements].
        groups, geometry: of the model's cache.
        kernels: of the device. One object serves one pass: kernels hand counters on from layer to layer.
        is_fresh: whether the plan is fresh.

    Attributes:
        arena: replaced by each write.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        columns: Mapping[str, jax.Array],
        tokens: Tokens,
        arena: jax.Array,
        groups: Sequence[CacheGroup],
        geometry: CacheGeometry,
        kernels: Kernels,
        is_fresh: bool = False,
    ) -> None:
        self.arena = arena
        self._phase = phase
        self._columns = columns
        self._tokens = tokens
        self._groups = {group.name: (group, fill) for group, fill in zip(groups, geometry.groups, strict=True)}
        self._kernels = kernels
        self._fresh_prefill = kernels.fresh_prefill if is_fresh else None
        self._fresh: dict[PlaneRef, jax.Array] = {}
        self._counters = Counters()

    def append(self, plane: PlaneRef, vectors: jax.Array) -> None:
        rows = self._rows(plane)
        with jax.named_scope("append"):
            self.arena = append_rows(
                self.arena,
                vectors,
                *self._destinations(plane),
                _start(rows, plane),
                page_entries=rows.page_entries,
                fp8_scale=rows.fp8_scale,
            )

    def target(self, plane: PlaneRef, how: Attend, sinks: jax.Array | None) -> AppendTarget:
        rows = self._rows(plane)
        keys, values = plane.halves()
        return AppendTarget(
            self.arena,
            *self._destinations(plane),
            key_row=_start(rows, keys),
            value_row=_start(rows, values),
            page_entries=rows.page_entries,
            fp8_scale=rows.fp8_scale,
            # Kernels that append compute in bfloat16 alone.
            wants_vectors=self._attends_fresh(jnp.bfloat16, keys, how, sinks),
        )

    def append_heads(self, plane: PlaneRef, heads: Heads) -> None:
        if heads.arena is None:
            assert heads.key is not None and heads.value is not None
            self.append(plane, jnp.concatenate([heads.key, heads.value], axis=1))
        else:
            self.arena = heads.arena
        if self._fresh_prefill is not None and heads.key is not None and heads.value is not None:
            self._fresh |= zip(plane.halves(), (heads.key, heads.value), strict=True)

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
        key, value = self._fresh.get(keys), self._fresh.get(values)
        is_held = key is not None and value is not None and not with_lse
        if self._fresh_prefill is not None and is_held and self._attends_fresh(query.dtype, keys, how, sinks):
            return Attended(self._fresh_prefill(query, key, value, scale=how.scale))
        return self._attend_pages(query, keys, values, how, sinks, with_lse)

    def _attend_pages(
        self,
        query: jax.Array,
        keys: PlaneRef,
        values: PlaneRef,
        how: Attend,
        sinks: jax.Array | None,
        with_lse: bool,
    ) -> Attended:
        rows, columns, group = self._rows(keys), self._columns, keys.group
        shared: dict[str, Any] = {
            "kv_heads": keys.rows,
            "page_entries": rows.page_entries,
            "scale": how.scale,
            "window": how.window,
            "sinks": sinks,
            "softcap": how.softcap,
            "fp8_scale": rows.fp8_scale,
            "with_lse": with_lse,
        }
        key_row, value_row = _start(rows, keys), _start(self._rows(values), values)
        pages = columns[f"page_indptr:{group}"], columns[f"page_ids:{group}"]
        lengths = columns["seq_lens"], columns[f"first_position:{group}"]
        if self._phase is Phase.DECODE:
            sequences = columns["seq_lens"].shape[0]
            queries = query.reshape(sequences, -1, *query.shape[1:])
            if queries.shape[1] > 1:
                shared["query_lens"] = columns["live_tokens"]
            shared["counters"] = self._counters.take(sequences * keys.rows)
            out, lse, counters = self._kernels.paged_decode(
                queries, self.arena, *pages, *lengths, key_row, value_row, **shared
            )
            self._counters.give_back(counters)
            return Attended(out.reshape(query.shape), None if lse is None else lse.reshape(query.shape[:2]))
        out, lse = self._kernels.paged_prefill(
            query, self.arena, *pages, columns["query_indptr"], *lengths, key_row, value_row, **shared
        )
        if self._fresh_prefill is not None:
            # Padding is undefined here, and becomes keys and values of layers that read no pages: these are finite.
            out = jnp.where(self._tokens.live[:, None, None], out, 0)
        return Attended(out, lse)

    def read_state(self, state: PlaneRef, dtype: jax.typing.DTypeLike) -> jax.Array:
        row = self._state_row(state)
        with jax.named_scope("read_state"):
            pages = self._true_state(state)
            held, self.arena = read_states(
                self.arena, pages, self._is_new(), row, rows=state.rows, width=state.width, dtype=dtype
            )
            return held

    def write_state(self, state: PlaneRef, value: jax.Array) -> None:
        if self._row_tokens > 1:
            raise InvalidRequest("draft_tokens", self._row_tokens - 1, "0 for a model that writes a State as a whole")
        with jax.named_scope("write_state"):
            pages = self._copies(state, "output")[:, 0].reshape(-1)
            self.arena = write_states(self.arena, pages, value, self._state_row(state))

    def shift_state(self, state: PlaneRef, x: jax.Array) -> list[jax.Array]:
        row, columns, count = self._state_row(state), self._columns, self._row_tokens
        with jax.named_scope("shift_state"):
            held, self.arena = self._kernels.shift_state(
                x,
                self.arena,
                self._true_state(state),
                self._copies(state, "output")[:, :count].reshape(-1),
                columns["query_indptr"],
                self._is_new(),
                row,
                taps=state.rows,
                copies=count,
            )
            if self._phase is Phase.DECODE and count == 1:
                return [held[:, age] for age in range(state.rows)]
            return shift_chunks(held, x, columns["query_indptr"])

    @property
    def _row_tokens(self) -> int:
        """Tokens of a sequence of which it is not known yet whether all hold; 1 in prefill."""
        if self._phase is Phase.PREFILL:
            return 1
        return int(self._tokens.ids.shape[0] // self._columns["seq_lens"].shape[0])

    def _copies(self, state: PlaneRef, side: str) -> jax.Array:
        """int32 [B, copies, pages], "input" or "output" pages of each copy of the sequences' states."""
        group, _ = self._group(state)
        return self._columns[f"{side}_pages:{state.group}"].reshape(self._is_new().shape[0], group.copies, -1)

    def _true_state(self, state: PlaneRef) -> jax.Array:
        """int32 [B * pages], the copy that the tokens so far have left; the first one where there were no drafts."""
        copies = self._copies(state, "input")
        if copies.shape[1] == 1 or self._phase is Phase.PREFILL:
            return copies[:, 0].reshape(-1)
        return jnp.take_along_axis(copies, self._columns["state_copy"][:, None, None], axis=1).reshape(-1)

    def _is_new(self) -> jax.Array:
        """bool [B], sequences whose State starts here."""
        return (self._columns["row_flags"] & RowFlag.FRESH_STATE) != 0

    def _state_row(self, state: PlaneRef) -> int:
        """Vectors from a state's start to the layer's."""
        group, _ = self._group(state)
        if not isinstance(group, StateGroup):
            raise InvalidRequest("group", group.name, "a State group")
        return first_row(group, 1, state.plane, self.arena.dtype) + state.row

    def _destinations(self, plane: PlaneRef) -> tuple[jax.Array, jax.Array]:
        """Page and entry that take each token."""
        return self._columns[f"append_pages:{plane.group}"], self._columns[f"append_offsets:{plane.group}"]

    def _group(self, ref: PlaneRef) -> Any:
        """The group and its geometry.

        Raises:
            InvalidRequest: the model declared no such group, or a plane that does not hold these rows.
        """
        if ref.group not in self._groups:
            raise InvalidRequest("group", ref.group, f"one of {sorted(self._groups)}")
        group, fill = self._groups[ref.group]
        check_plane(group, ref.plane, rows=ref.row + ref.rows, width=ref.width)
        return group, fill

    def _rows(self, ref: PlaneRef) -> PlaneRows:
        """Where its plane lies."""
        group, fill = self._group(ref)
        return plane_rows(group, fill, ref.plane, self.arena)

    def _attends_fresh(self, dtype: jax.typing.DTypeLike, keys: PlaneRef, how: Attend, sinks: jax.Array | None) -> bool:
        """Whether a layer attends to the plan's own keys, and reads no pages."""
        group, _ = self._group(keys)
        sees_tokens = isinstance(group, HistoryGroup) and group.tokens_per_entry == 1
        return (self._fresh_prefill is not None and sees_tokens) and fits_fresh_prefill(
            dtype,
            keys.width,
            window=how.window,
            sinks=sinks,
            softcap=how.softcap,
            fp8_scale=self._rows(keys).fp8_scale,
        )


def _start(rows: PlaneRows, ref: PlaneRef) -> int:
    """Vectors from a page's start to the first of these rows."""
    return rows.first_row + ref.row * rows.page_entries
