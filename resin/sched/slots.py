"""Column store of the running requests: one row a device slot, so that a step touches arrays instead of objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resin.plan.layout import KEPT_COLUMNS
from resin.plan.sampling import MAX_STOP_TOKENS, SAMPLING_COLUMNS, policy_flags
from resin.sched.request import Request

# What one decode step does to a slot's counts when its plan is accepted and when it is committed, drafts aside.
#           computed, pending, in_flight, committed, known, outputs, drafts
ACCEPTED = (1, 1, 1, 0, 0, 0, 0)
COMMITTED = (0, -1, -1, 1, 1, 1, 0)
DISCARDED = (0, -1, -1, 1, 0, 0, 0)

FIRST_DRAFT_RATE = 0.5  # before any was checked


class SlotTable:
    """Per-slot columns. Row `max_sequences` is scratch, as on the device.

    Args:
        max_sequences: slots.
        count_rows: rows of the device's token counts, one for each request with penalties; the one after them is
            scratch.

    Attributes:
        count_row: int32 [rows], the row of token counts that the slot's request has, scratch if it needs none.
        counts: int32 [rows, 7], the seven columns below (they are views of it).
        computed: tokens whose cache entries exist or are being written by plans in flight, if all their drafts hold.
        committed: the same without plans in flight.
        known: prompt and output tokens the host knows.
        pending: tokens that plans in flight will emit, if all their drafts hold.
        in_flight: plans in flight that hold a row of the slot.
        outputs: output tokens so far.
        drafts: of plans in flight.
        min_outputs, max_outputs: bounds of outputs.
        ready: drafts that the slot's latest collected plan left for the next.
        draft_rate: share of its drafts that lately were right, of those that were checked.
        together: who got their latest token together at `together_s`, if nobody of them has had one since.
        columns: int32 [KEPT_COLUMNS, rows], what a decode plan says of each slot; those of scratch are padding.
    """

    def __init__(self, max_sequences: int, count_rows: int) -> None:
        rows = max_sequences + 1
        self._free = list(range(max_sequences - 1, -1, -1))
        self._free_counts = list(range(count_rows - 1, -1, -1))
        self._no_counts = count_rows
        self.count_row = np.full(rows, count_rows, np.int32)
        self.requests: list[Request | None] = [None] * rows
        self.counts = np.zeros((rows, len(ACCEPTED)), np.int32)
        changes: tuple[tuple[int, ...], ...] = (ACCEPTED, COMMITTED)
        self._changes = {change: np.tile(np.array(change, np.int32), rows) for change in changes}
        columns = self.counts.T
        self.computed, self.pending, self.in_flight, self.committed, self.known, self.outputs, self.drafts = columns
        self.ready = np.zeros(rows, np.int32)
        self.draft_rate = np.zeros(rows, np.float32)
        self.min_outputs = np.zeros(rows, np.int32)
        self.max_outputs = np.zeros(rows, np.int32)
        self.last_token = np.zeros(rows, np.int32)
        self.last_step = np.zeros(rows, np.int64)
        self.last_token_s = np.zeros(rows, np.float64)
        self.together: object = None
        self.together_s = 0.0
        self.stop_ids = np.full((rows, MAX_STOP_TOKENS), -1, np.int32)
        self.columns = np.zeros((len(KEPT_COLUMNS), rows), np.int32)
        named = dict(zip(KEPT_COLUMNS, self.columns, strict=True))
        named["slots"][:], named["next_token"][:] = np.arange(rows), -1
        self.flags = named["row_flags"]
        self.top_logprobs = np.zeros(rows, np.int32)
        self.constrained = np.zeros(rows, np.bool_)
        self.sampling = {column.name: named[column.name].view(column.dtype) for column in SAMPLING_COLUMNS}

    def add(self, slots: np.ndarray, runs: list[slice] | None, change: tuple[int, ...]) -> None:
        """Adds ACCEPTED or COMMITTED to the counts of the slots, which `runs` are as slices, if they are few."""
        values = self._changes[change]
        if runs is None:
            self.counts[slots] += values[: len(change)]
            return
        for run in runs:  # each one piece of memory
            part = self.counts[run].reshape(-1)
            part += values[: len(part)]

    @property
    def free(self) -> int:
        return len(self._free)

    def has_room(self, request: Request) -> bool:
        """Whether a slot is free, and a row of token counts if the request needs one."""
        return bool(self._free) and (bool(self._free_counts) or not request.params.has_penalties)

    def take(self, request: Request) -> None:
        """Gives the request a free slot and fills its row; nothing is computed yet."""
        slot = self._free.pop()
        request.slot = slot
        self.requests[slot] = request
        params = request.params
        if params.has_penalties:
            self.count_row[slot] = self._free_counts.pop()
        self.counts[slot] = self.ready[slot] = 0
        self.draft_rate[slot] = FIRST_DRAFT_RATE
        self.known[slot] = request.num_tokens
        self.outputs[slot] = len(request.output_ids)
        self.min_outputs[slot] = params.min_output_tokens
        self.max_outputs[slot] = request.max_outputs
        self.last_step[slot] = 0
        self.last_token_s[slot] = request.last_token_s
        self.stop_ids[slot] = -1
        if not params.ignore_stop:
            self.stop_ids[slot, : len(params.stop_token_ids)] = params.stop_token_ids
        self.flags[slot] = policy_flags(params)
        self.top_logprobs[slot] = params.logprobs or 0
        self.constrained[slot] = params.allowed_tokens is not None
        for column in SAMPLING_COLUMNS:
            self.sampling[column.name][slot] = column.value(params, request.seed)

    def waiting(self, requests: Sequence[Request]) -> int:
        """Tokens of these requests that are known and not computed."""
        slots = np.array([request.slot for request in requests], np.int32)
        return int((self.known[slots] - self.computed[slots]).sum())

    def give_back(self, request: Request) -> None:
        slot = request.slot
        self.requests[slot] = None
        self._free.append(slot)
        if self.count_row[slot] != self._no_counts:
            self._free_counts.append(int(self.count_row[slot]))
            self.count_row[slot] = self._no_counts
        request.slot = -1
