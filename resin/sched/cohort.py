"""The decode cohort: rows that decode together, with everything about them that a step need not build again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from resin.plan import Bucket, PlanLayout
from resin.sched.cache import PagedGroup
from resin.sched.lease import CacheLease
from resin.sched.request import Request
from resin.sched.slots import SlotTable


class Cohort:
    """Sticky rows of consecutive decode plans. Membership never changes: another set of rows is another cohort.

    Attributes:
        slots: int32 [n], rising.
        rows: the same as an index into the columns of the SlotTable.
        steps_left: steps until the first row reaches its output limit, plans in flight counted as done.
        views: for each paged group, the pages that each request's next token can see, chronological.
        row_pages, tails, first_positions: int32 [groups, n], length, last page and first token of each view.
        total_pages: pages of all rows, for each paged group.
        input_pages, output_pages: for each State group int32 [n, pages].
        dirty: indices whose pages changed since they were last read.
    """

    def __init__(
        self, requests: list[Request], table: SlotTable, paged: list[PagedGroup], state_pages: list[int]
    ) -> None:
        count = len(requests)
        self.requests = requests = sorted(requests, key=lambda request: request.slot)
        self.index = {request.slot: i for i, request in enumerate(requests)}
        self.slots = slots = np.fromiter((request.slot for request in requests), np.int32, count)
        # Slots without a gap are addressed as a slice: several times faster than an index array.
        gapless = count > 0 and int(slots[-1]) - int(slots[0]) == count - 1
        self.rows: slice | np.ndarray = slice(int(slots[0]), int(slots[-1]) + 1) if gapless else slots
        self.leases: list[CacheLease] = [request.lease for request in requests if request.lease is not None]
        assert len(self.leases) == count
        self.ids = tuple([request.id for request in requests])
        self.append_output: list[Callable[[int], None]] = [request.output_ids.append for request in requests]
        self.indptr = np.arange(count + 1)
        room = table.max_outputs[slots] - table.outputs[slots] - table.pending[slots]
        self.steps_left = int(room.min(initial=1 << 30))
        stop_ids = table.stop_ids[slots]
        self.stop_ids = stop_ids[:, : int((stop_ids >= 0).sum(axis=1).max(initial=0))]
        self.constrained = bool(table.constrained[slots].any())
        self.has_minimum = bool((table.min_outputs[slots] > table.outputs[slots]).any())
        self._computed = table.computed
        self._paged = paged
        self.views: list[list[np.ndarray]] = [[np.empty(0, np.int32)] * count for _ in paged]
        self.row_pages = np.zeros((len(paged), count), np.int32)
        self.tails = np.zeros((len(paged), count), np.int32)
        self.first_positions = np.zeros((len(paged), count), np.int32)
        self.total_pages = [0] * len(paged)
        self.input_pages = [np.zeros((count, pages), np.int32) for pages in state_pages]
        self.output_pages = [np.zeros((count, pages), np.int32) for pages in state_pages]
        self.pages_version = 0  # of the columns that `refresh` and `set_state_input` write
        self.dirty: set[int] = set(range(count))
        self.template: PlanTemplate | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def refresh(self) -> None:
        """Reads the rows again whose pages changed."""
        if not self.dirty:
            return
        dirty = list(self.dirty)
        for index, paged in enumerate(self._paged):
            rows = [self.leases[i].rows[index] for i in dirty]
            firsts = []
            for i, row in zip(dirty, rows, strict=True):
                first = row.first
                if paged.window_tokens:  # the row may still hold what a plan in flight sees
                    first = max(first, paged.first_needed(int(self._computed[self.slots[i]])))
                self.views[index][i] = row.view(first)
                firsts.append(first)
            self.row_pages[index, dirty] = [row.end - first for row, first in zip(rows, firsts, strict=True)]
            self.tails[index, dirty] = [row.last_page for row in rows]
            self.first_positions[index, dirty] = np.multiply(firsts, paged.span_tokens)
        for i in dirty:
            for group, ring in enumerate(self.leases[i].states):
                assert ring.current is not None
                self.output_pages[group][i] = ring.current
                self.input_pages[group][i] = ring.current
        self.dirty.clear()
        self.total_pages = self.row_pages.sum(axis=1).tolist()
        self.pages_version += 1

    def growing(self, computed: np.ndarray) -> list[list[int]]:
        """For each paged group the rows whose next token starts a page."""
        return [np.flatnonzero(computed % group.span_tokens == 0).tolist() for group in self._paged]

    def set_state_input(self, i: int) -> None:
        """The row's states move to new pages in this plan: read them from the checkpoint just sealed."""
        for group, ring in enumerate(self.leases[i].states):
            self.input_pages[group][i] = ring.held[-1][1]
        self.pages_version += 1


class PlanTemplate:
    """The buffer of the cohort's latest plan; the next plan is a copy with the changed columns written over."""

    def __init__(self, bucket: Bucket, layout: PlanLayout) -> None:
        self.bucket = bucket
        self.buffer = np.zeros(layout.words, np.int32)
        self.columns = layout.views(self.buffer)
        self.pages_version = 0  # of the cohort, when its page columns were last written here
        self.from_slot: bool | None = None  # what the rows' flags say, None if they differ or are not written
