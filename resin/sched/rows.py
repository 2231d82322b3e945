"""Decode rows: which request decodes in which place of the plans, and everything about them that a step need not
build again."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import NOBODY, RowFlag
from resin.plan.flags import SPECIAL
from resin.plan.sampling import MAX_STOP_TOKENS
from resin.sched.lease import CacheLease, PagedGroup
from resin.sched.request import Request
from resin.sched.slots import SlotTable

MAX_RUNS = 4
_NEVER = 1 << 30
_EMIT = int(RowFlag.EMIT)


@dataclass(slots=True)
class LiveRows:
    """The rows of one decode plan, in the order of their places; shared by plans while nothing about it changes.

    Attributes:
        requests, append_output: [n], and where each one's next token goes.
        slots: int32 [n].
        index: the same as an index into the columns of the SlotTable.
        runs: the same as slices, if they are few.
        emits: bool [places], None if no place among them is empty.
        ids: [places], NOBODY where a place is empty.
        stop_ids: int32 [k, n], stop tokens in columns, -1 where a row has fewer.
        top_logprobs: most likely tokens to report, the largest of all rows.
    """

    requests: tuple[Request, ...]
    append_output: list[Callable[[int], None]]
    slots: np.ndarray
    index: slice | np.ndarray
    runs: list[slice] | None
    emits: np.ndarray | None
    ids: tuple[int, ...]
    stop_ids: np.ndarray
    top_logprobs: int

    def __len__(self) -> int:
        return len(self.requests)


class _Phases(dict[int, list[set[int]]]):
    """For each span the live places by the remainder of `steps` at which a row's next position is a multiple of it.

    Dropped where drafts move many rows at once.
    """

    def fill(self, span: int, places: np.ndarray, starts: np.ndarray) -> None:
        """All live places, and their positions less `steps`."""
        phases = self[span] = [set() for _ in range(span)]
        for place, phase in zip(places.tolist(), (-starts % span).tolist(), strict=True):
            phases[phase].add(place)

    def add(self, place: int, start: int) -> None:
        for span, phases in self.items():
            phases[-start % span].add(place)

    def discard(self, place: int, start: int) -> None:
        for span, phases in self.items():
            phases[-start % span].discard(place)


class DecodeRows:
    """Places of the decode plans. A request keeps its place while it decodes; an empty place is padding.

    Joins, ends and pauses touch the places concerned and nothing else. A row is *live* unless it pauses.

    Args:
        table: columns of the slots.
        capacity: most rows of a plan.

    Attributes:
        requests: by place, None where it is empty.
        leases: by place, None where no row is live.
        slots: int32 [capacity], scratch where no row is live.
        marks: int32 [capacity], EMIT where a row is live.
        steps: plans accepted; each computes a token of every live row, and drafts (`advance`).
        dirty: places whose pages changed since they were last written into a plan, other than by growing.
        changed: places that came, went, paused or resumed since.
        constrained: places whose rows have a mask, which waits for the row's latest token.
        short: places of rows that have not reached their minimum length.
    """

    def __init__(self, table: SlotTable, capacity: int) -> None:
        self.table = table
        self.capacity = capacity
        self.scratch = len(table.flags) - 1
        self.requests: list[Request | None] = [None] * capacity
        self.leases: list[CacheLease | None] = [None] * capacity
        self.slots = np.full(capacity, self.scratch, np.int32)
        self.marks = np.zeros(capacity, np.int32)
        self.steps = 0
        self.dirty: set[int] = set()
        self.changed: set[int] = set()
        self.constrained: set[int] = set()
        self.short: set[int] = set()
        self.count = 0  # rows, pausing ones too
        self.num_live = 0
        self._places: dict[Request, int] = {}
        self._empty = list(range(capacity))
        self._paused: set[int] = set()
        self._starts = np.zeros(capacity, np.int32)  # a live row's position less `steps`
        self._phases = _Phases()
        self._tries_drafts = False  # whether any plan ever had drafts
        self._ends = np.full(capacity, _NEVER, np.int64)  # value of `steps` at which a live row has all its tokens
        self._ids = [NOBODY] * capacity
        self._append: list[Callable[[int], None] | None] = [None] * capacity
        self._stop_ids = np.full((MAX_STOP_TOKENS, capacity), -1, np.int32)
        self._logprobs: dict[int, int] = {}  # most likely tokens to report, of rows that ask for some
        self._stop_width = 0  # of the longest list of any row so far
        self._live: LiveRows | None = None
        self._latest: LiveRows | None = None  # gathered last
        self._kept: dict[frozenset[int], LiveRows] = {}  # by who pauses, while none joins or leaves
        self._top = 0
        self._first_end = _NEVER

    def __contains__(self, request: object) -> bool:
        return request in self._places

    def place(self, request: Request) -> int:
        return self._places[request]

    # -- membership ---------------------------------------------------------------------------------------------

    def join(self, request: Request) -> int:
        """Gives the request the lowest empty place."""
        place, slot, table = heapq.heappop(self._empty), request.slot, self.table
        self.requests[place] = request
        self._places[request] = place
        self._stop_ids[:, place] = table.stop_ids[slot]
        self._stop_width = max(self._stop_width, int(np.count_nonzero(table.stop_ids[slot] >= 0)))
        self._append[place] = request.output_ids.append
        if table.constrained[slot]:
            self.constrained.add(place)
        if table.top_logprobs[slot]:
            self._logprobs[place] = int(table.top_logprobs[slot])
        if table.min_outputs[slot] > table.outputs[slot]:
            self.short.add(place)
        self.count += 1
        self._kept.clear()
        self._enter(place, request)
        return place

    def leave(self, place: int) -> None:
        """Empties the place."""
        request = self.request(place)
        if place in self._paused:
            self._paused.remove(place)
        else:
            self._exit(place)
        del self._places[request]
        self.requests[place] = self._append[place] = None
        self._logprobs.pop(place, None)
        for noted in (self.constrained, self.short, self.dirty):
            noted.discard(place)
        self.count -= 1
        self._kept.clear()
        heapq.heappush(self._empty, place)

    def pause(self, places: Iterable[int]) -> None:
        """These rows, and of the paused ones no others, are padding in the next plan."""
        wanted = set(places)
        for place in wanted - self._paused:
            self._exit(place)
        for place in self._paused - wanted:
            self._enter(place, self.request(place))
        self._paused = wanted

    def compact(self) -> None:
        """Moves all rows to the lowest places, live ones in front."""
        rows = [(place in self._paused, place, request) for place, request in enumerate(self.requests) if request]
        for _, place, _ in rows:
            self.leave(place)
        for is_paused, _, request in rows:
            if not is_paused:
                self.join(request)
        self.pause([self.join(request) for is_paused, _, request in rows if is_paused])

    def _enter(self, place: int, request: Request) -> None:
        table, slot = self.table, request.slot
        self._starts[place] = start = int(table.computed[slot]) - self.steps
        self._phases.add(place, start)
        end = self.steps + int(table.max_outputs[slot] - table.outputs[slot] - table.pending[slot])
        self._ends[place] = end
        self._first_end = min(self._first_end, end)  # what left may have ended first: `live` looks again
        self.slots[place], self.marks[place], self._ids[place] = slot, _EMIT, request.id
        self.leases[place] = request.lease
        self.num_live += 1
        self._touch(place)

    def _exit(self, place: int) -> None:
        self._phases.discard(place, int(self._starts[place]))
        self._ends[place] = _NEVER
        self.slots[place], self.marks[place], self._ids[place] = self.scratch, 0, NOBODY
        self.leases[place] = None
        self.num_live -= 1
        self._touch(place)

    def _touch(self, place: int) -> None:
        self.changed.add(place)
        self._live = None

    # -- what a plan needs --------------------------------------------------------------------------------------

    def live(self) -> LiveRows:
        """The live rows as they are now."""
        if self._live is None:
            # A row that waits for its token at every second plan is there and gone by turns.
            key = frozenset(self._paused)
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = self._latest = _gather(self, self._latest)
            self._live, self._top = kept, len(kept.ids)
            self._first_end = int(np.minimum.reduce(self._ends[: self._top], initial=_NEVER))
        return self._live

    @property
    def top(self) -> int:
        """Places up to the last live row."""
        self.live()
        return self._top

    def finished(self) -> list[int]:
        """Places of rows whose last token is in a plan already."""
        if self.steps < self._first_end:
            return []
        places: list[int] = (self._ends <= self.steps).nonzero()[0].tolist()
        return places

    def ending(self) -> list[int]:
        """Which of the live rows get their last token from the next plan, rising."""
        live = self.live()
        if self.steps + 1 < self._first_end:
            return []
        ends = self._ends[: self._top] if live.emits is None else self._ends[: self._top][live.emits]
        return (ends <= self.steps + 1).nonzero()[0].tolist()

    def position(self, place: int) -> int:
        """Place in its sequence of the token that the row computes next, if all drafts in flight hold."""
        return int(self._starts[place]) + self.steps

    def least_position(self, place: int) -> int:
        """The same if none holds."""
        if not self._tries_drafts:
            return self.position(place)
        return self.position(place) - int(self.table.drafts[self.slots[place]])

    def positions(self, count: int, out: np.ndarray | None = None) -> np.ndarray:
        """int32 [count], `position` of the first places, 0 where no row is live; written to `out` if given."""
        positions = np.add(self._starts[:count], self.steps, out=out)
        if self.num_live < count:
            positions *= self.marks[:count]
        return positions

    def starting(self, span_tokens: int) -> list[int]:
        """Places of live rows whose next position is a multiple of `span_tokens`, rising."""
        if span_tokens not in self._phases:
            places = self.marks.nonzero()[0]
            self._phases.fill(span_tokens, places, self._starts[places])
        return sorted(self._phases[span_tokens][self.steps % span_tokens])

    # -- drafts -------------------------------------------------------------------------------------------------

    def draft_limits(self, most: int) -> np.ndarray:
        """int32 [top], how many drafts each live row may try: none where something looks at its tokens one by one."""
        slots, table = self.slots[: self.top], self.table
        left = np.clip(self._ends[: self._top] - self.steps - 1, 0, most).astype(np.int32)
        left[(table.flags[slots] & SPECIAL != 0) | (self.marks[: self._top] == 0)] = 0
        left[[place for place in self.short if place < self._top]] = 0
        return left

    def advance(self, drafts: np.ndarray) -> None:
        """A plan was accepted; beside the token of each live row it computes `drafts` [top] more, or [0] for none."""
        self.steps += 1
        if len(drafts):
            self._tries_drafts = True
            self._phases.clear()
            self._starts[: len(drafts)] += drafts
            self._ends[: len(drafts)] -= drafts
            self._first_end = int(self._ends.min())

    def take_back(self, place: int, tokens: int) -> None:
        """So many of the tokens that the row's plans computed did not hold."""
        self._phases.clear()
        self._starts[place] -= tokens
        self._ends[place] += tokens

    def is_live(self, place: int) -> bool:
        return self.leases[place] is not None

    def lease(self, place: int) -> CacheLease:
        """Of a live row."""
        lease = self.leases[place]
        assert lease is not None
        return lease

    def request(self, place: int) -> Request:
        """Of a row, live or not."""
        request = self.requests[place]
        assert request is not None
        return request


def _gather(rows: DecodeRows, latest: LiveRows | None) -> LiveRows:
    """The live rows, with what stays as `latest` has it."""
    (occupied,) = rows.marks.nonzero()
    count = len(occupied)
    top = int(occupied[-1]) + 1 if count else 0
    requests, append = rows.requests[:top], rows._append[:top]
    slots, stop_ids, emits = rows.slots[:top], rows._stop_ids[: rows._stop_width, :top], None
    if count == top:
        stop_ids = stop_ids.copy()
    else:
        emits = rows.marks[:top] != 0
        slots = slots.take(occupied)
        stop_ids = stop_ids.take(occupied, axis=1)
        for place in reversed((~emits).nonzero()[0].tolist()):
            del requests[place], append[place]
    if latest is not None and count == len(latest.slots) and (slots == latest.slots).all():
        slots, index, runs = latest.slots, latest.index, latest.runs  # others in the places of those that ended
    else:
        runs = _runs(slots := slots.copy())
        index = runs[0] if runs is not None and len(runs) == 1 else slots
    ids = tuple(rows._ids[:top])
    logprobs = max([rows._logprobs[place] for place in rows._logprobs if rows.marks[place]], default=0)
    return LiveRows(tuple(requests), append, slots, index, runs, emits, ids, stop_ids, logprobs)  # type: ignore[arg-type]


def visible_pages(rows: DecodeRows, groups: Sequence[PagedGroup], growing: Sequence[list[int]]) -> list[int]:
    """For each paged group the pages that the next tokens of all live rows see."""
    totals = []
    for index, (group, starting) in enumerate(zip(groups, growing, strict=True)):
        total = len(starting)
        for place, lease in enumerate(rows.leases[: rows.top]):
            if lease is not None:
                row = lease.rows[index]
                total += len(row) - max(group.first_needed(rows.least_position(place)) - row.first, 0)
        totals.append(total)
    return totals


def _runs(slots: np.ndarray) -> list[slice] | None:
    """The slots as slices of rising ones without a gap, several times faster than an index array; None if too many."""
    edges = (slots[1:] - slots[:-1] != 1).nonzero()[0].tolist()
    if len(edges) >= MAX_RUNS or not len(slots):
        return None
    starts, stops = [0, *(edge + 1 for edge in edges)], [*(edge + 1 for edge in edges), len(slots)]
    return [slice(int(slots[a]), int(slots[a]) + b - a) for a, b in zip(starts, stops, strict=True)]
