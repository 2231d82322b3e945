"""Fills BatchPlans: pure layout work, no decisions. Everything it reads was reserved before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import (
    BatchPlan,
    Bucket,
    PlanLayout,
    RowFlag,
    RunnerConfig,
    SlotLoad,
    StateGroup,
    empty_plan,
    plan_layout,
)
from resin.plan.layout import Header
from resin.sched.buffers import BufferPool
from resin.sched.image import DecodeColumns, DecodeImage
from resin.sched.lease import PagedGroup
from resin.sched.request import Request
from resin.sched.rows import DecodeRows
from resin.sched.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request's part of a prefill plan: tokens `[start, stop)` of its sequence."""

    request: Request
    start: int
    stop: int
    emits: bool


class Planner:
    """Builds frozen plans for one runner's config; `windows` are its paged groups as the cache sees them."""

    def __init__(self, config: RunnerConfig, table: SlotTable, windows: Sequence[PagedGroup]) -> None:
        self._config = config
        self._table = table
        self._scratch_slot = config.max_sequences
        self._drafts = config.draft_tokens > 0  # made of the sequence's tokens, which the device has to know
        self._specs = pairs = tuple(zip(config.groups, config.geometry.groups, strict=True))
        self._memory = BufferPool()
        self._layouts: dict[Bucket, PlanLayout] = {}
        self._columns: dict[Bucket, DecodeColumns] = {}
        self._paged = [(group, fill) for group, fill in pairs if not isinstance(group, StateGroup)]
        self._states = [(group, fill) for group, fill in pairs if isinstance(group, StateGroup)]
        self._windows = windows
        self.image: DecodeImage | None = None  # the latest decode plan's buffer, from which the next one is made
        self.state_pages = [fill.pages_per_state for _, fill in self._states]

    def row_pages(self, paged_pages: Sequence[int]) -> tuple[int, ...]:
        """Bucket capacity needs, in group order, from the page counts of the paged groups (States need none)."""
        counts = iter(paged_pages)
        return tuple(0 if isinstance(group, StateGroup) else int(next(counts)) for group in self._config.groups)

    # -- decode -------------------------------------------------------------------------------------------------

    def plan_decode(
        self,
        step: int,
        bucket: Bucket,
        rows: DecodeRows,
        growing: list[list[int]],
        masks: np.ndarray | None,
        drafts: np.ndarray | None = None,
    ) -> BatchPlan:
        """One token for each live row, and drafts in a bucket that has places for them; `growing` are the places of
        each paged group that start a page."""
        image = self.image
        if image is None or image.bucket is not bucket:
            image = self.image = DecodeImage(bucket, self._decode_columns(bucket), rows, self._memory)
        if bucket.width > 1 and drafts is None:
            drafts = np.zeros(rows.top, np.int32)
        buffer, count = image.write_next(growing, drafts), rows.top
        buffer.flags.writeable = False
        tokens, ids = count * bucket.width, rows.live().ids
        return BatchPlan(step, bucket, count, tokens, buffer, image.layout, self._specs, (), masks, ids)

    def _decode_columns(self, bucket: Bucket) -> DecodeColumns:
        columns = self._columns.get(bucket)
        if columns is None:
            columns = DecodeColumns(self._layout(bucket), self._specs, self._windows)
            if self._config.buckets:  # exact-size plans: every shape may be new
                self._columns[bucket] = columns
        return columns

    @staticmethod
    def _fill_rows(
        columns: dict[str, np.ndarray], name: str, rows: list[np.ndarray], lengths: np.ndarray, count: int
    ) -> None:
        indptr = columns[f"page_indptr:{name}"]
        np.cumsum(lengths, out=indptr[1 : count + 1])
        total = int(indptr[count])
        indptr[count + 1 :] = total
        np.concatenate(rows, out=columns[f"page_ids:{name}"][:total])

    # -- prefill ------------------------------------------------------------------------------------------------

    def plan_prefill(self, step: int, bucket: Bucket, chunks: list[Chunk], masks: np.ndarray | None) -> BatchPlan:
        """A chunk of each request; all pages up to each chunk's end are in its lease."""
        table, count = self._table, len(chunks)
        slots = np.fromiter((chunk.request.slot for chunk in chunks), np.int32, count)
        layout = self._layout(bucket)
        buffer = self._memory.take(layout.words)
        buffer[:] = 0
        columns = layout.views(buffer)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int32, count)
        stops = np.fromiter((chunk.stop for chunk in chunks), np.int32, count)
        indptr = columns["query_indptr"]
        np.cumsum(stops - starts, out=indptr[1 : count + 1])
        tokens = int(indptr[count])
        indptr[count + 1 :] = tokens
        flags = np.fromiter((self._prefill_flags(chunk) for chunk in chunks), np.int32, count)
        emitting = (flags & RowFlag.EMIT) != 0
        top = int(table.top_logprobs[slots[emitting]].max(initial=0))
        for chunk in chunks:
            if self._wants_prompt_logprobs(chunk):
                top = max(top, chunk.request.params.prompt_logprobs or 0)
        columns["header"][:] = Header(count, tokens, int(np.bitwise_or.reduce(flags)), top)
        for i, chunk in enumerate(chunks):
            part = slice(indptr[i], indptr[i + 1])
            columns["token_ids"][part] = chunk.request.token_slice(chunk.start, chunk.stop)
        columns["computed"][:count] = starts
        columns["slots"][:count] = slots
        columns["slots"][count:] = self._scratch_slot
        columns["row_flags"][:count] = flags
        columns["next_token"][:] = -1
        columns["next_token"][:count] = [_next_token(chunk) for chunk in chunks]
        for name, values in table.sampling.items():
            columns[name][:count] = values[slots]
        self._fill_prefill_pages(columns, chunks)
        needed = [chunk.emits and (self._drafts or chunk.request.params.needs_slot_load) for chunk in chunks]
        loads = tuple(self._slot_load(chunk) for chunk, needs in zip(chunks, needed, strict=True) if needs)
        ids = tuple(chunk.request.id for chunk in chunks)
        buffer.flags.writeable = False
        return BatchPlan(step, bucket, count, tokens, buffer, layout, self._specs, loads, masks, ids)

    def _fill_prefill_pages(self, columns: dict[str, np.ndarray], chunks: list[Chunk]) -> None:
        leases = [chunk.request.lease for chunk in chunks]
        for group, (spec, fill) in enumerate(self._paged):
            name = spec.name
            rows = [lease.rows[group] for lease in leases if lease is not None]
            firsts = [
                max(row.first, self._windows[group].first_needed(chunk.start))
                for row, chunk in zip(rows, chunks, strict=True)
            ]
            views = [row.view(first) for row, first in zip(rows, firsts, strict=True)]
            lengths = np.fromiter((len(view) for view in views), np.int32, len(views))
            self._fill_rows(columns, name, views, lengths, len(rows))
            columns[f"first_position:{name}"][: len(rows)] = np.multiply(firsts, fill.span_tokens)
        for group, (state, fill) in enumerate(self._states):
            width = fill.pages_per_state
            for i, (chunk, lease) in enumerate(zip(chunks, leases, strict=True)):
                assert lease is not None
                ring, part = lease.states[group], slice(i * width, (i + 1) * width)
                columns[f"output_pages:{state.name}"][part] = ring.current
                columns[f"input_pages:{state.name}"][part] = ring.at(chunk.start, -1) or ring.current

    def _prefill_flags(self, chunk: Chunk) -> int:
        request, slot = chunk.request, chunk.request.slot
        flags = 0
        if chunk.emits:
            flags = int(self._table.flags[slot]) | RowFlag.EMIT
            if len(request.output_ids) < request.params.min_output_tokens:
                flags |= RowFlag.SUPPRESS_STOP
        if chunk.start == 0:
            flags |= RowFlag.FRESH_STATE
        if self._wants_prompt_logprobs(chunk):
            flags |= RowFlag.PROMPT_LOGPROBS
        return int(flags)

    @staticmethod
    def _wants_prompt_logprobs(chunk: Chunk) -> bool:
        wanted = chunk.request.prompt_logprobs
        return wanted is not None and wanted.filled < len(chunk.request.prompt_ids) - 1

    def _slot_load(self, chunk: Chunk) -> SlotLoad:
        request, params = chunk.request, chunk.request.params
        return SlotLoad(
            slot=request.slot,
            count_row=int(self._table.count_row[request.slot]),
            token_ids=request.token_slice(0, chunk.stop),
            prompt_tokens=len(request.prompt_ids),
            bias_ids=np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias)),
            bias_values=np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
            stop_ids=np.asarray(params.stop_token_ids, np.int32),
        )

    # -- any ---------------------------------------------------------------------------------------------------

    def plan_nothing(self, step: int, bucket: Bucket) -> BatchPlan:
        """The part of a replica with nothing to do in a step that others run."""
        return empty_plan(self._config, bucket, step)

    def _layout(self, bucket: Bucket) -> PlanLayout:
        layout = self._layouts.get(bucket)
        if layout is None:
            layout = self._layouts[bucket] = plan_layout(bucket, self._config.groups, self._config.geometry)
            if not self._config.buckets:  # exact-size plans: every shape may be new
                self._layouts.clear()
                self._memory = BufferPool()
        return layout


def _next_token(chunk: Chunk) -> int:
    """The known token after the chunk, -1 if the chunk ends the sequence."""
    request = chunk.request
    return int(request.token_slice(chunk.stop, chunk.stop + 1)[0]) if chunk.stop < request.num_tokens else -1
