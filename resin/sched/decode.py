"""Buffers of consecutive decode plans: each is the one before with what a step changes written over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import Bucket, CacheGroup, GroupGeometry, PlanLayout, RowFlag, StateGroup
from resin.plan.batch import SAMPLING_COLUMNS
from resin.sched.cohort import Cohort
from resin.sched.lease import PagedGroup, StateRing
from resin.sched.slots import SlotTable


@dataclass(frozen=True, slots=True)
class _PagedColumns:
    """Offsets in the buffer of a History or Window group's columns."""

    group: PagedGroup
    tokens_per_entry: int
    page_entries: int
    indptr: int
    first_position: int
    append_pages: int
    append_offsets: int
    ids: int
    ids_stop: int


@dataclass(frozen=True, slots=True)
class _StateColumns:
    input: int
    output: int
    pages: int


class DecodeColumns:
    """Where the columns of one bucket lie, as plain numbers. Page ids come last, what rises by one a step first."""

    def __init__(
        self, layout: PlanLayout, specs: Sequence[tuple[CacheGroup, GroupGeometry]], groups: Sequence[PagedGroup]
    ) -> None:
        at = {name: column.offset for name, column in layout.by_name.items()}
        self.layout = layout
        self.rising_stop = at["token_ids"]
        self.positions, self.seq_lens, self.token_ids = at["positions"], at["seq_lens"], at["token_ids"]
        self.row_flags = at["row_flags"]
        self.paged: list[_PagedColumns] = []
        self.states: list[_StateColumns] = []
        remaining = iter(groups)
        for spec, fill in specs:
            name = spec.name
            if isinstance(spec, StateGroup):
                places = at[f"input_pages:{name}"], at[f"output_pages:{name}"]
                self.states.append(_StateColumns(*places, fill.pages_per_state))
                continue
            ids = layout.by_name[f"page_ids:{name}"]
            columns = _PagedColumns(
                group=next(remaining),
                tokens_per_entry=spec.tokens_per_entry,
                page_entries=fill.page_entries,
                indptr=at[f"page_indptr:{name}"],
                first_position=at[f"first_position:{name}"],
                append_pages=at[f"append_pages:{name}"],
                append_offsets=at[f"append_offsets:{name}"],
                ids=ids.offset,
                ids_stop=ids.offset + ids.length,
            )
            self.paged.append(columns)
        self.head_stop = min((group.ids for group in self.paged), default=layout.words)


class DecodeImage:
    """The latest buffer of one cohort in one bucket. `write_next` makes a new one; none is changed afterwards.

    Attributes:
        totals: pages of each paged group in the latest buffer.
    """

    def __init__(self, bucket: Bucket, columns: DecodeColumns, cohort: Cohort, table: SlotTable) -> None:
        self.bucket = bucket
        self.layout = columns.layout
        self.totals = [0] * len(columns.paged)
        self._columns = columns
        self._cohort = cohort
        self._table = table
        self._from_slot: bool | None = None  # what all rows' flags say; None if they differ or may change
        self._rise = np.zeros(columns.rising_stop, np.int32)
        self._buffer: np.ndarray | None = None

    def write_next(self, growing: Sequence[list[int]], scratch_slot: int) -> np.ndarray:
        """int32 [layout.words]: the buffer of the cohort's next plan.

        Args:
            growing: for each paged group the rows that start a page with this plan.
            scratch_slot: slot of padding rows.
        """
        cohort, columns = self._cohort, self._columns
        if self._buffer is None:
            buffer = self._first(scratch_slot)
        else:
            buffer = self._copy_and_patch(self._buffer, growing)
        for index, group in enumerate(columns.paged):
            if group.tokens_per_entry > 1:
                self._fill_compressed(buffer, index, group)
        self._fill_tokens(buffer)
        cohort.dirty.clear()
        self._buffer = buffer
        return buffer

    # -- the first plan -----------------------------------------------------------------------------------------

    def _first(self, scratch_slot: int) -> np.ndarray:
        columns, cohort, table = self._columns, self._cohort, self._table
        count, slots = len(cohort), cohort.slots
        buffer = np.zeros(columns.layout.words, np.int32)
        views = columns.layout.views(buffer)
        positions = np.asarray(cohort.starts, np.int32) + cohort.steps
        views["header"][:2] = count
        views["header"][3] = table.top_logprobs[slots].max(initial=0)
        views["positions"][:count] = positions
        views["seq_lens"][:count] = positions + 1
        views["query_indptr"][:] = count
        views["query_indptr"][: count + 1] = cohort.indptr
        views["slots"][:] = scratch_slot
        views["slots"][:count] = slots
        views["next_token"][:] = -1
        for name in SAMPLING_COLUMNS:
            views[name][:count] = table.sampling[name][slots]
        for index, group in enumerate(columns.paged):
            self._first_rows(buffer, index, group)
            if group.tokens_per_entry == 1:
                offsets = buffer[group.append_offsets : group.append_offsets + count]
                np.remainder(positions, group.page_entries, out=offsets)
                self._rise[group.append_offsets : group.append_offsets + count] = 1
        for index, states in enumerate(columns.states):
            rings = [lease.states[index] for lease in cohort.leases]
            sources = [self._state_source(ring, i) for i, ring in enumerate(rings)]
            words = count * states.pages
            buffer[states.input : states.input + words] = np.asarray(sources).reshape(-1)
            buffer[states.output : states.output + words] = np.asarray([ring.current for ring in rings]).reshape(-1)
        for start in (columns.positions, columns.seq_lens):
            self._rise[start : start + count] = 1
        return buffer

    def _first_rows(self, buffer: np.ndarray, index: int, group: _PagedColumns) -> None:
        cohort, count = self._cohort, len(self._cohort)
        rows = [lease.rows[index] for lease in cohort.leases]
        if group.group.window_tokens:
            firsts = [self._first_page(index, group, i) for i in range(count)]
            views = [row.view(first) for row, first in zip(rows, firsts, strict=True)]
            buffer[group.first_position : group.first_position + count] = np.multiply(firsts, group.group.span_tokens)
        else:
            views = [row.view() for row in rows]
        ends = np.add.accumulate([len(view) for view in views])
        total = self.totals[index] = int(ends[-1])
        buffer[group.indptr + 1 : group.indptr + 1 + count] = ends
        buffer[group.indptr + 1 + count : group.indptr + 1 + self.bucket.sequences] = total
        np.concatenate(views, out=buffer[group.ids : group.ids + total])
        buffer[group.append_pages : group.append_pages + count] = buffer[ends + (group.ids - 1)]

    # -- later plans --------------------------------------------------------------------------------------------

    def _copy_and_patch(self, latest: np.ndarray, growing: Sequence[list[int]]) -> np.ndarray:
        columns, dirty = self._columns, self._cohort.dirty
        buffer = np.empty(columns.layout.words, np.int32)
        buffer[: columns.head_stop] = latest[: columns.head_stop]
        rising = buffer[: columns.rising_stop]
        rising += self._rise
        for index, (group, rows) in enumerate(zip(columns.paged, growing, strict=True)):
            changed = sorted({*rows, *dirty}) if dirty else rows
            if changed:
                self._patch_rows(buffer, latest, index, group, changed)
            else:
                buffer[group.ids : group.ids_stop] = latest[group.ids : group.ids_stop]
            if group.tokens_per_entry == 1:
                for i in rows:
                    buffer[group.append_offsets + i] = 0
        if columns.states:
            for i in dirty:
                self._fill_states(buffer, i)
        return buffer

    def _patch_rows(
        self, buffer: np.ndarray, latest: np.ndarray, index: int, group: _PagedColumns, changed: list[int]
    ) -> None:
        """Page ids with the changed rows (rising) replaced, and what follows from their new lengths."""
        cohort, windowed, ids = self._cohort, group.group.window_tokens, group.ids
        indptr, append_pages = group.indptr, group.append_pages
        indptr_stop = indptr + self.bucket.sequences + 1
        read = write = ids
        shift = 0  # of the row ends behind the rows done so far
        for i in changed:
            row = cohort.leases[i].rows[index]
            first = self._first_page(index, group, i) if windowed else row.first
            pages = row.view(first)
            start, stop = ids + int(latest[indptr + i]), ids + int(latest[indptr + i + 1])
            if start > read:
                buffer[write : write + start - read] = latest[read:start]
                write += start - read
            buffer[write : write + len(pages)] = pages
            write += len(pages)
            read = stop
            if write - read != shift:
                buffer[indptr + i + 1 : indptr_stop] += write - read - shift
                shift = write - read
            buffer[append_pages + i] = pages[-1]
            if windowed:
                buffer[group.first_position + i] = first * group.group.span_tokens
        stop = ids + self.totals[index]
        buffer[write : write + stop - read] = latest[read:stop]
        write += stop - read
        buffer[write : group.ids_stop] = 0
        self.totals[index] = write - ids

    def _first_page(self, index: int, group: _PagedColumns, i: int) -> int:
        """Logical index of the first page that the row's next token sees; the row may hold older ones for a while."""
        row = self._cohort.leases[i].rows[index]
        return max(row.first, group.group.first_needed(self._cohort.position(i)))

    def _fill_states(self, buffer: np.ndarray, i: int) -> None:
        for ring, states in zip(self._cohort.leases[i].states, self._columns.states, strict=True):
            at, pages = i * states.pages, states.pages
            buffer[states.input + at : states.input + at + pages] = self._state_source(ring, i)
            buffer[states.output + at : states.output + at + pages] = ring.current

    def _state_source(self, ring: StateRing, i: int) -> list[int]:
        """A row whose state moves to new pages with this plan reads the checkpoint just sealed."""
        assert ring.current is not None
        if ring.held and ring.held[-1][0] == self._cohort.position(i):
            return ring.held[-1][1]
        return ring.current

    # -- every plan ---------------------------------------------------------------------------------------------

    def _fill_compressed(self, buffer: np.ndarray, index: int, group: _PagedColumns) -> None:
        """Append places of a group whose entries take several tokens: only the token that completes one has a place."""
        cohort, count, ratio = self._cohort, len(self._cohort), group.tokens_per_entry
        positions = buffer[self._columns.positions : self._columns.positions + count]
        complete = (positions + 1) % ratio == 0
        tails = [lease.rows[index].last_page for lease in cohort.leases]
        buffer[group.append_pages : group.append_pages + count] = np.where(complete, tails, 0)
        offsets = positions // ratio % group.page_entries
        buffer[group.append_offsets : group.append_offsets + count] = np.where(complete, offsets, 0)

    def _fill_tokens(self, buffer: np.ndarray) -> None:
        """Token ids and flags; those of the latest plan hold while all rows take their tokens from their slots."""
        cohort, table, columns = self._cohort, self._table, self._columns
        # A plan in flight before the cohort's second one is the cohort's own: its rows are all pending or none is.
        if self._from_slot is not None and not cohort.has_minimum:
            from_slot = bool(table.pending[cohort.requests[0].slot])
            if from_slot and self._from_slot:
                return
        count = len(cohort)
        pending = table.pending[cohort.rows] > 0
        flags = table.flags[cohort.rows] | RowFlag.EMIT
        flags[pending] |= RowFlag.FROM_SLOT
        if cohort.has_minimum:
            outputs = table.outputs[cohort.rows] + table.pending[cohort.rows]
            flags[outputs < table.min_outputs[cohort.rows]] |= RowFlag.SUPPRESS_STOP
        buffer[2] = np.bitwise_or.reduce(flags)
        buffer[columns.row_flags : columns.row_flags + count] = flags
        buffer[columns.token_ids : columns.token_ids + count] = np.where(pending, 0, table.last_token[cohort.rows])
        self._from_slot = bool(pending[0]) if pending.all() or not pending.any() else None
