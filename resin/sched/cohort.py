"""The decode cohort: rows that decode together, with everything about them that a step need not build again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from resin.sched.lease import CacheLease
from resin.sched.request import Request
from resin.sched.slots import SlotTable

if TYPE_CHECKING:
    from resin.sched.decode import DecodeImage

_NONE: list[int] = []


class Cohort:
    """Sticky rows of consecutive decode plans. Membership never changes: another set of rows is another cohort.

    Attributes:
        slots: int32 [n], rising.
        rows: the same as an index into the columns of the SlotTable.
        starts: tokens of each row that were computed, or in flight, when the cohort began.
        steps: plans of the cohort accepted since; each computes one token of every row.
        steps_left: steps until the first row reaches its output limit, plans in flight counted as done.
        stop_ids: int32 [k, n], the rows' stop tokens in columns, -1 where a row has fewer.
        dirty: rows whose pages changed since they were last written into a plan, other than by growing.
        image: the latest plan's buffer, from which the next one is made.
        last_commit_s: when the tokens of the cohort's latest plan arrived, None before the first.
    """

    def __init__(self, requests: list[Request], table: SlotTable) -> None:
        count = len(requests)
        ordered = sorted(requests, key=attrgetter("slot"))
        self.requests = tuple(ordered)
        self.slots = slots = np.array([request.slot for request in ordered], np.int32)
        # Slots without a gap are addressed as a slice: several times faster than an index array.
        gapless = count > 0 and int(slots[-1]) - int(slots[0]) == count - 1
        self.rows: slice | np.ndarray = slice(int(slots[0]), int(slots[-1]) + 1) if gapless else slots
        self.leases: list[CacheLease] = [request.lease for request in ordered if request.lease is not None]
        assert len(self.leases) == count
        self.ids = tuple([request.id for request in ordered])
        self.append_output: list[Callable[[int], None]] = [request.output_ids.append for request in ordered]
        self.indptr = np.arange(count + 1)
        self.indptr.flags.writeable = False
        self.starts: list[int] = table.computed[slots].tolist()
        self.steps = 0
        room = table.max_outputs[slots] - table.outputs[slots] - table.pending[slots]
        self.steps_left = int(room.min(initial=1 << 30))
        stop_ids = table.stop_ids[slots]
        width = int((stop_ids >= 0).sum(axis=1).max(initial=0))
        self.stop_ids = np.ascontiguousarray(stop_ids[:, :width].T)
        self.constrained = bool(table.constrained[slots].any())
        self.has_minimum = bool((table.min_outputs[slots] > table.outputs[slots]).any())
        self.dirty: set[int] = set()
        self.image: DecodeImage | None = None
        self.last_commit_s: float | None = None
        self._phases: dict[int, list[list[int]]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def index(self) -> dict[int, int]:
        """Row of each slot."""
        return {slot: i for i, slot in enumerate(self.slots.tolist())}

    def position(self, i: int) -> int:
        """Place in its sequence of the token that row i computes next."""
        return self.starts[i] + self.steps

    def starting(self, span_tokens: int) -> list[int]:
        """Rows whose next position is a multiple of `span_tokens`."""
        if not self.steps:  # a cohort of one plan needs no more
            return [i for i, start in enumerate(self.starts) if not start % span_tokens]
        phases = self._phases.get(span_tokens)
        if phases is None:
            phases = self._phases[span_tokens] = [_NONE] * span_tokens
            for i, start in enumerate(self.starts):
                phase = -start % span_tokens
                if phases[phase]:
                    phases[phase].append(i)
                else:
                    phases[phase] = [i]
        return phases[self.steps % span_tokens]
