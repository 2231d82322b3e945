"""Buffers of consecutive decode plans: each is the one before with what a step changes written over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import Bucket, CacheGroup, GroupGeometry, PlanLayout, RowFlag, StateGroup
from resin.plan.layout import HEADER
from resin.sched.buffers import BufferPool
from resin.sched.lease import PagedGroup, StateRing
from resin.sched.page_columns import PagedColumns
from resin.sched.rows import DecodeRows

_FROM_SLOT = int(RowFlag.FROM_SLOT)
_NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class _StateColumns:
    input: int
    output: int
    pages: int


class DecodeColumns:
    """Where the columns of one bucket lie, as plain numbers; page ids come last."""

    def __init__(
        self, layout: PlanLayout, specs: Sequence[tuple[CacheGroup, GroupGeometry]], groups: Sequence[PagedGroup]
    ) -> None:
        at = {name: column.offset for name, column in layout.by_name.items()}
        self.layout = layout
        self.token_ids, self.computed, self.drafts = at["token_ids"], at["computed"], at.get("drafts")
        self.query_indptr, self.row_flags = at["query_indptr"], at["row_flags"]
        self.paged: list[PagedColumns] = []
        self.states: list[_StateColumns] = []
        remaining = iter(groups)
        for spec, fill in specs:
            name = spec.name
            if isinstance(spec, StateGroup):
                places = at[f"input_pages:{name}"], at[f"output_pages:{name}"]
                self.states.append(_StateColumns(*places, fill.pages_per_state))
                continue
            ids = layout.by_name[f"page_ids:{name}"]
            columns = PagedColumns(
                group=next(remaining),
                width=layout.by_name["slots"].length,
                indptr=at[f"page_indptr:{name}"],
                first_position=at[f"first_position:{name}"],
                ids=ids.offset,
                ids_stop=ids.offset + ids.length,
            )
            self.paged.append(columns)
        self.head_stop = min((group.ids for group in self.paged), default=layout.words)


class DecodeImage:
    """The latest buffer of the decode rows in one bucket. `write_next` makes a new one; none is changed afterwards.

    Attributes:
        totals: pages of each paged group in the latest buffer.
    """

    def __init__(self, bucket: Bucket, columns: DecodeColumns, rows: DecodeRows, memory: BufferPool) -> None:
        self.bucket = bucket
        self.layout = columns.layout
        self.totals = [0] * len(columns.paged)
        self._columns = columns
        self._rows = rows
        self._memory = memory
        self._with_ids: set[int] = set()  # live rows of the latest buffer that did not take their token from their slot
        self._top = 0
        self._buffer: np.ndarray | None = None

    def write_next(self, growing: Sequence[list[int]], drafts: np.ndarray | None = None) -> np.ndarray:
        """int32 [layout.words]: the buffer of the rows' next plan.

        Args:
            growing: for each paged group the places whose rows start pages with this plan, once a page.
            drafts: int32 [top], how many drafts each row may try, in a bucket with room for them.
        """
        rows, columns = self._rows, self._columns
        latest, width = self._buffer, self.bucket.sequences
        dirty = {place for place in rows.dirty if place < width}
        if latest is None:
            changed = set(range(rows.top))
            buffer = self._write_all()
        else:
            changed = {place for place in rows.changed if place < width}
            buffer = self._copy(latest)
            for place in changed:
                self._write_place(buffer, place)
            if changed:
                self._write_top(buffer)
            self._patch_pages(buffer, latest, growing, changed | dirty)
        if columns.states:
            for place in changed | dirty:
                self._write_states(buffer, place)
        self._write_tokens(buffer, changed)
        rows.positions(width, out=buffer[columns.computed : columns.computed + width])
        if drafts is not None:
            assert columns.drafts is not None
            buffer[columns.drafts : columns.drafts + len(drafts)] = drafts
            buffer[columns.drafts + len(drafts) : columns.drafts + width] = 0
        rows.dirty.clear()
        rows.changed.clear()
        self._buffer = buffer
        return buffer

    def pages_next(self, growing: Sequence[list[int]]) -> list[int]:
        """Pages of each paged group in the buffer of the next plan, at most (Window rows may have fewer)."""
        rows, latest = self._rows, self._buffer
        assert latest is not None
        if not rows.changed:
            return [total + len(starting) for total, starting in zip(self.totals, growing, strict=True)]
        totals = []
        for index, (group, starting, total) in enumerate(zip(self._columns.paged, growing, self.totals, strict=True)):
            total += len(starting)
            for place in rows.changed:
                if place < self.bucket.sequences:
                    total -= int(latest[group.indptr + place + 1] - latest[group.indptr + place])
                lease = rows.leases[place]
                if lease is not None:
                    total += len(lease.rows[index].view(self._first_page(index, group, place)))
            totals.append(total)
        return totals

    # -- places that came, went, paused or resumed --------------------------------------------------------------

    def _copy(self, latest: np.ndarray) -> np.ndarray:
        columns = self._columns
        buffer = self._memory.take(columns.layout.words)
        buffer[: columns.head_stop] = latest[: columns.head_stop]
        return buffer

    def _write_all(self) -> np.ndarray:
        """A buffer made from nothing."""
        rows, columns, width = self._rows, self._columns, self.bucket.sequences
        buffer = np.zeros(columns.layout.words, np.int32)
        columns.layout.kept(buffer)[:] = rows.table.columns[:, rows.slots[:width]]
        self._write_top(buffer)
        for index, group in enumerate(columns.paged):
            self._write_all_pages(buffer, index, group)
        return buffer

    def _write_place(self, buffer: np.ndarray, place: int) -> None:
        """What does not depend on pages, of a row that came or resumed, or of the padding in place of one that went."""
        rows, columns = self._rows, self._columns
        columns.layout.kept(buffer)[:, place] = rows.table.columns[:, rows.slots[place]]
        buffer[columns.token_ids + place * self.bucket.width] = 0

    def _write_top(self, buffer: np.ndarray) -> None:
        """What follows from the number of places in use, and from who is in them."""
        rows, bucket = self._rows, self.bucket
        self._top = top = rows.top
        tokens = top * bucket.width
        buffer[HEADER.num_sequences], buffer[HEADER.num_tokens] = top, tokens
        buffer[HEADER.top_logprobs] = rows.live().top_logprobs
        start = self._columns.query_indptr
        if buffer[start + bucket.sequences] != tokens:
            buffer[start : start + top] = np.arange(0, tokens, bucket.width)
            buffer[start + top : start + bucket.sequences + 1] = tokens

    def _write_states(self, buffer: np.ndarray, place: int) -> None:
        lease = self._rows.leases[place]
        for index, states in enumerate(self._columns.states):
            at, pages = place * states.pages, states.pages
            source = target = [0] * pages
            if lease is not None:
                source, target = self._state_pages(lease.states[index], place)
            buffer[states.input + at : states.input + at + pages] = source
            buffer[states.output + at : states.output + at + pages] = target

    def _state_pages(self, ring: StateRing, place: int) -> tuple[list[int], list[int]]:
        """A row whose state moves to new pages with this plan reads the checkpoint just sealed."""
        assert ring.current is not None
        if ring.held and ring.held[-1][0] == self._rows.position(place):
            return ring.held[-1][1], ring.current
        return ring.current, ring.current

    # -- page rows ----------------------------------------------------------------------------------------------

    def _write_all_pages(self, buffer: np.ndarray, index: int, group: PagedColumns) -> None:
        top = self._rows.top
        firsts = [self._first_page(index, group, place) for place in range(top)]
        views = [self._pages(index, place, first) for place, first in enumerate(firsts)]
        ends = np.add.accumulate([len(view) for view in views])
        total = self.totals[index] = int(ends[-1])
        buffer[group.indptr + 1 : group.indptr + 1 + top] = ends
        buffer[group.indptr + 1 + top : group.indptr + 1 + self.bucket.sequences] = total
        np.concatenate(views, out=buffer[group.ids : group.ids + total])
        if group.group.window_tokens:
            buffer[group.first_position : group.first_position + top] = np.multiply(firsts, group.group.span_tokens)

    def _patch_pages(
        self, buffer: np.ndarray, latest: np.ndarray, growing: Sequence[list[int]], others: set[int]
    ) -> None:
        columns = self._columns
        for index, (group, starting) in enumerate(zip(columns.paged, growing, strict=True)):
            changed = sorted({*starting, *others}) if others or columns.drafts is not None else starting
            if not changed:
                buffer[group.ids : group.ids_stop] = latest[group.ids : group.ids_stop]
            elif changed is starting and not group.group.window_tokens:
                last = [self._last_page(index, place) for place in starting]
                self.totals[index] = group.append(buffer, latest, self.totals[index], starting, last)
            else:
                firsts = [self._first_page(index, group, place) for place in changed]
                rows = [self._pages(index, place, first) for place, first in zip(changed, firsts, strict=True)]
                self.totals[index] = group.replace(buffer, latest, self.totals[index], changed, firsts, rows)

    def _last_page(self, index: int, place: int) -> int:
        """Of a live row."""
        return self._rows.leases[place].rows[index].last_page  # type: ignore[union-attr]

    def _pages(self, index: int, place: int, first: int) -> np.ndarray:
        """The page row as the next token sees it; none where no row is live."""
        lease = self._rows.leases[place]
        return lease.rows[index].view(first) if lease is not None else _NO_PAGES

    def _first_page(self, index: int, group: PagedColumns, place: int) -> int:
        """Logical index of the first page that the row's next token sees; the row may hold older ones for a while."""
        lease = self._rows.leases[place]
        if not group.group.window_tokens or lease is None:
            return 0
        return max(lease.rows[index].first, group.group.first_needed(self._rows.least_position(place)))

    # -- every plan ---------------------------------------------------------------------------------------------

    def _write_tokens(self, buffer: np.ndarray, changed: set[int]) -> None:
        """Token ids and flags.

        Rows that were in the latest plan have their tokens in their slots as long as it is in flight, and were written
        so then: what came, and what has taken its token from the plan so far, is left.
        """
        rows, table, columns, top = self._rows, self._rows.table, self._columns, self._top
        stays = next((place for place in range(top) if rows.marks[place] and place not in changed), None)
        if stays is None or rows.short or len(changed) > top // 2 or not table.pending[rows.slots[stays]]:
            self._write_all_tokens(buffer)
            return
        late = {place for place in self._with_ids | changed if place < top}
        for place in late:
            slot = rows.slots[place]
            pending = bool(table.pending[slot])
            flags = table.flags[slot] | rows.marks[place]
            buffer[columns.row_flags + place] = flags | _FROM_SLOT if pending else flags
            buffer[columns.token_ids + place * self.bucket.width] = 0 if pending else table.last_token[slot]
            if pending or not rows.marks[place]:
                self._with_ids.discard(place)
            else:
                self._with_ids.add(place)
        self._with_ids.intersection_update(late)
        if late or changed:
            buffer[HEADER.any_flags] = np.bitwise_or.reduce(buffer[columns.row_flags : columns.row_flags + top])

    def _write_all_tokens(self, buffer: np.ndarray) -> None:
        rows, table, columns, top = self._rows, self._rows.table, self._columns, self._top
        placed, live = rows.live(), rows.marks[:top] != 0
        slots = placed.index if placed.emits is None else rows.slots[:top]
        pending = table.pending[slots] > 0
        flags = table.flags[slots] | rows.marks[:top]
        flags[pending] |= RowFlag.FROM_SLOT
        if rows.short:
            outputs = table.outputs[slots] + table.pending[slots]
            flags[outputs < table.min_outputs[slots]] |= RowFlag.SUPPRESS_STOP
            rows.short.difference_update(np.flatnonzero(live & (outputs >= table.min_outputs[slots])).tolist())
        buffer[HEADER.any_flags] = np.bitwise_or.reduce(flags)
        buffer[columns.row_flags : columns.row_flags + top] = flags
        width = self.bucket.width
        firsts = buffer[columns.token_ids : columns.token_ids + top * width : width]
        firsts[:] = np.where(pending, 0, table.last_token[slots])
        self._with_ids = set(np.flatnonzero(live & ~pending).tolist())
