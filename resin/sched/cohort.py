"""The decode cohort: rows that decode together, with everything about them that a step need not build again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from resin.sched.lease import CacheLease
from resin.sched.request import Request
from resin.sched.slots import SlotTable


class Cohort:
    """Sticky rows of consecutive decode plans. Membership never changes: another set of rows is another cohort.

    Attributes:
        slots: int32 [n].
        views: for each paged group, the row of pages of each request, chronological.
        row_pages, tails, first_positions: int32 [groups, n], length, last page and first token of each row.
        input_pages, output_pages: for each State group int32 [n, pages].
        statics: column name -> [n] columns that stay the same from step to step.
    """

    def __init__(self, requests: list[Request], table: SlotTable, spans: list[int], state_pages: list[int]) -> None:
        count = len(requests)
        self.requests = requests
        self.slots = np.fromiter((request.slot for request in requests), np.int32, count)
        self.index = {request.slot: i for i, request in enumerate(requests)}
        self.leases: list[CacheLease] = [request.lease for request in requests if request.lease is not None]
        assert len(self.leases) == count
        self.append_output: list[Callable[[int], None]] = [request.output_ids.append for request in requests]
        self._spans = spans
        self.views: list[list[np.ndarray]] = [[np.empty(0, np.int32)] * count for _ in spans]
        self.row_pages = np.zeros((len(spans), count), np.int32)
        self.tails = np.zeros((len(spans), count), np.int32)
        self.first_positions = np.zeros((len(spans), count), np.int32)
        self.input_pages = [np.zeros((count, pages), np.int32) for pages in state_pages]
        self.output_pages = [np.zeros((count, pages), np.int32) for pages in state_pages]
        self.statics = {name: column[self.slots] for name, column in table.sampling.items()}
        self.flags = table.flags[self.slots]
        self.top_logprobs = int(table.top_logprobs[self.slots].max(initial=0))
        self.stop_ids = table.stop_ids[self.slots]
        self.has_stops = bool((self.stop_ids >= 0).any())
        self.max_outputs = table.max_outputs[self.slots]
        self.min_outputs = table.min_outputs[self.slots]
        self.has_minimum = bool((self.min_outputs > 0).any())
        self.constrained = bool(table.constrained[self.slots].any())
        self.dirty: set[int] = set(range(count))

    def __len__(self) -> int:
        return len(self.requests)

    def refresh(self) -> None:
        """Reads the rows again whose pages changed since the last plan."""
        for i in self.dirty:
            lease = self.leases[i]
            for group, row in enumerate(lease.rows):
                view = row.view()
                self.views[group][i] = view
                self.row_pages[group, i] = len(view)
                self.tails[group, i] = view[-1]
                self.first_positions[group, i] = row.first * self._spans[group]
            for group, ring in enumerate(lease.states):
                assert ring.current is not None
                self.output_pages[group][i] = ring.current
                self.input_pages[group][i] = ring.current
        self.dirty.clear()

    def set_state_input(self, i: int) -> None:
        """The row's states move to new pages in this plan: read them from the checkpoint just sealed."""
        for group, ring in enumerate(self.leases[i].states):
            self.input_pages[group][i] = ring.held[-1][1]
