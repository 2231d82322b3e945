"""Requests that decode: whose turn it is, in which places, and what their next tokens take."""

from __future__ import annotations

import numpy as np

from resin.plan import Bucket, Phase, RunnerConfig, smallest_bucket
from resin.sched.cache import CacheManager, Reservation
from resin.sched.drafts import DraftPolicy
from resin.sched.planner import Planner
from resin.sched.request import Request, RequestState
from resin.sched.rows import DecodeRows, visible_pages
from resin.sched.slots import SlotTable
from resin.sched.step import DecodePart, Needs

_NONE = np.zeros(0, np.int32)
_EXACT = 1 << 30  # plans of exact size have no bucket to stay in


class Decoding:
    """The requests of one replica that decode.

    Attributes:
        requests: in the order in which they came.
        rows: the places of those whose turn it is.
    """

    def __init__(
        self, config: RunnerConfig, cache: CacheManager, table: SlotTable, planner: Planner, drafts: DraftPolicy
    ) -> None:
        self.requests: list[Request] = []
        self._config = config
        self._cache = cache
        self._table = table
        self._planner = planner
        buckets = config.of_phase(Phase.DECODE)
        self._max_rows = max((bucket.sequences for bucket in buckets), default=config.max_sequences)
        self.rows = DecodeRows(table, self._max_rows)
        # For each bucket the sequences of the next smaller one: with more rows than that it is not too large.
        sizes = sorted({0, *(bucket.sequences for bucket in buckets)})
        self._smaller = {bucket: sizes[sizes.index(bucket.sequences) - 1] for bucket in buckets}
        self._joining: list[Request] = []  # requests that have no place yet
        self._takes_turns = False  # whether more rows decode than one plan holds
        self._steps = 0
        self._drafts = drafts
        # Whether rows must stop at checkpoints, whose States others read, though drafts may skip them.
        self._is_careful = cache.seals_states and config.draft_tokens > 0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._joining.append(request)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)
        if request in self.rows:
            self.rows.leave(self.rows.place(request))
        elif request in self._joining:
            self._joining.remove(request)

    def rows_changed(self, request: Request) -> None:
        """The next plan must read the request's page rows again."""
        if request in self.rows:
            self.rows.dirty.add(self.rows.place(request))

    def ready(self) -> list[Request]:
        """Who can decode: no plan in flight may end them, and no mask waits for a token still in flight."""
        table, slots = self._table, np.array([request.slot for request in self.requests], np.int32)
        stays = table.outputs[slots] + table.pending[slots] >= table.max_outputs[slots]
        stays |= table.constrained[slots] & (table.pending[slots] > 0)
        if not stays.any():
            return self.requests
        return [request for request, stay in zip(self.requests, stays.tolist(), strict=True) if not stay]

    def accept(self, part: DecodePart) -> None:
        """The runner took the plan."""
        self._steps += 1
        self.rows.advance(part.drafts if part.drafts is not None else _NONE)
        if part.drafts is not None:
            slots, drafts = part.rows.slots, part.drafts_of_rows
            self._table.computed[slots] += drafts
            self._table.pending[slots] += drafts
            self._table.drafts[slots] += drafts
        if self._takes_turns:
            self._table.last_step[part.rows.index] = self._steps

    def take_back(self, request: Request, tokens: int) -> None:
        """So many of the tokens that a collected plan computed for the request did not hold."""
        slot, table = request.slot, self._table
        table.computed[slot] -= tokens
        table.pending[slot] -= tokens
        if request in self.rows:
            self.rows.take_back(self.rows.place(request), tokens)
        elif request.state is RequestState.DECODE and request not in self._joining:
            self._joining.append(request)  # it left as if all had held

    # -- places -------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Gives places to rows that start to decode, takes them from rows whose last token is on its way, and pauses
        rows that wait for a plan in flight. False if that leaves no live row."""
        rows = self.rows
        for place in rows.finished():
            rows.leave(place)
        if self._takes_turns or len(self._joining) > rows.capacity - rows.count:
            self._seat(self.ready())
        elif self._joining:
            self._joining = [request for request in self._joining if not self._try_join(request)]
        if rows.constrained or self._is_careful:
            rows.pause(self._waiting())
        if not self._config.buckets and rows.top > rows.num_live:
            rows.compact()  # exact-size plans have no padding
        return bool(rows.num_live)

    def _waiting(self) -> list[int]:
        """Places of rows that cannot go on before plans in flight come back: their mask waits for a token, or they may
        stand at a checkpoint of their States, or before it."""
        rows, table = self.rows, self._table
        waiting = [place for place in rows.constrained if table.pending[rows.request(place).slot]]
        if self._is_careful and table.drafts.any():
            slots = [(place, request.slot) for place, request in enumerate(rows.requests) if request is not None]
            at_checkpoint = table.computed % self._cache.checkpoint_tokens == 0
            waiting += [place for place, slot in slots if table.drafts[slot] and at_checkpoint[slot]]
        return waiting

    def _try_join(self, request: Request) -> bool:
        """False if the request's mask waits for a token in flight."""
        table, slot = self._table, request.slot
        if table.constrained[slot] and table.pending[slot]:
            return False
        if table.outputs[slot] + table.pending[slot] < table.max_outputs[slot]:
            self.rows.join(request)
        return True

    def _seat(self, candidates: list[Request]) -> None:
        """Gives the places to the candidates whose turn it is."""
        rows = self.rows
        chosen = dict.fromkeys(self._rows_that_fit(candidates))
        self._takes_turns = len(chosen) < len(candidates)
        for request in self.requests:
            if request in rows and request not in chosen:
                rows.leave(rows.place(request))
        for request in chosen:
            if request not in rows:
                rows.join(request)
        rows.compact()
        self._joining = [request for request in self.requests if request not in rows]

    def _rows_that_fit(self, rows: list[Request]) -> list[Request]:
        """As many of the rows that waited longest for a step as one bucket holds."""
        rows = sorted(rows, key=lambda request: (int(self._table.last_step[request.slot]), request.rank, request.id))
        rows = rows[: self._max_rows]
        pages = []
        for request in rows:
            most, lease = int(self._table.computed[request.slot]), request.lease
            assert lease is not None
            least, groups = most - int(self._table.drafts[request.slot]), range(len(self._cache.paged))
            pages.append([self._cache.row_pages(lease, index, least, most + 1) for index in groups])
        totals = np.cumsum(pages, axis=0)
        for count in range(len(rows), 1, -1):
            needs = self._planner.row_pages(totals[count - 1])
            if smallest_bucket(self._config.buckets, Phase.DECODE, count, count, needs) is not None:
                return rows[:count]
        return rows[:1]

    # -- the next plan ------------------------------------------------------------------------------------------

    def reserve(self) -> DecodePart | None:
        """One more token of every live row, and drafts where they pay and find room; None, and nothing reserved, if the
        rows find no room together."""
        width = 1 + self._config.draft_tokens
        part = self._fit(width) if self._drafts.pay(self.rows, width) else None
        return part or self._fit(1)

    def _fit(self, width: int) -> DecodePart | None:
        """Bucket and pages of a plan of this width; None, and nothing reserved, if one is missing."""
        rows, cache = self.rows, self._cache
        bucket, row_pages, growing = self._bucket(width)
        if bucket is None and width == 1:  # decode as many rows as a bucket holds, the others next time
            self._seat(self.ready())
            bucket, row_pages, growing = self._bucket(width)
            assert bucket is not None, "every request was let in because it fits alone"
        if bucket is None:
            return None
        sealing = rows.starting(cache.checkpoint_tokens) if cache.seals_states else []
        reservation = Reservation()
        if not self._extend_rows(growing, sealing, reservation):
            return None
        needs = Needs(rows.top, rows.top * width, row_pages, width)
        drafts = self._draft_limits(width) if width > 1 else None
        return DecodePart(bucket, needs, reservation, rows.live(), growing, sealing, rows.ending(), drafts)

    def _draft_limits(self, width: int) -> np.ndarray:
        """int32 [top], how many drafts each place may try."""
        rows, span = self.rows, self._cache.checkpoint_tokens
        limits = rows.draft_limits(width - 1)
        if self._is_careful:
            # The plan that reaches a checkpoint has no drafts: it leaves the State in the first copy.
            most = rows.positions(rows.top)
            least = most - self._table.drafts[rows.slots[: rows.top]]
            limits = np.clip((least // span + 1) * span - most - 2, 0, limits)
        return limits.astype(np.int32)

    def _extend_rows(self, growing: list[list[int]], sealing: list[int], reservation: Reservation) -> bool:
        """Reserves room for one more token of every row; all or nothing."""
        rows, leases = self.rows, self.rows.leases
        extended = [[leases[place].rows[index] for place in places] for index, places in enumerate(growing)]  # type: ignore[union-attr]
        seals = [(rows.lease(place), rows.position(place)) for place in sealing]
        committed: list[list[int]] = []  # for each Window group, of every page
        for group, places in zip(self._cache.paged, growing, strict=True):
            if group.window_tokens:
                committed.append(self._table.committed[rows.slots[places]].tolist())
        return self._cache.try_extend_rows(extended, committed, seals, reservation)

    def _bucket(self, width: int) -> tuple[Bucket | None, tuple[int, ...], list[list[int]]]:
        """The smallest bucket of the width that holds all rows once their next tokens have room, and that of the latest
        plan while none comes or goes; the pages of their rows; and who grows. Rows move to lower places if that is what
        it takes."""
        rows, image, buckets, growing = self.rows, self._planner.image, self._config.buckets, self._growing(width)
        if image is not None and image.bucket.width != width:
            image = None
        totals = image.pages_next(growing) if image is not None else visible_pages(rows, self._cache.paged, growing)
        needs = self._planner.row_pages(totals)
        if image is not None and rows.count > self._smaller.get(image.bucket, _EXACT):
            if image.bucket.holds(rows.top, rows.top * width, needs):
                return image.bucket, needs, growing
        count = rows.count if buckets else rows.num_live
        best = smallest_bucket(buckets, Phase.DECODE, count, count * width, needs, width=width)
        if best is not None and not best.holds(rows.top, rows.top * width, needs):
            rows.compact()
            growing = self._growing(width)
        return best, needs, growing

    def _growing(self, width: int) -> list[list[int]]:
        """For each paged group the places whose rows start a page with their next tokens, once a page."""
        rows, groups = self.rows, self._cache.paged
        if not self._config.draft_tokens:
            return [rows.starting(group.span_tokens) for group in groups]
        # Rows may hold pages already, of drafts that did not hold.
        ends = rows.positions(rows.top) + 1
        if width > 1:
            ends += self._draft_limits(width)
        places = [(place, lease) for place, lease in enumerate(rows.leases[: rows.top]) if lease is not None]
        growing: list[list[int]] = []
        for index, group in enumerate(groups):
            needed = (-(-ends // group.span_tokens)).tolist()
            growing.append([place for place, lease in places for _ in range(lease.rows[index].end, needed[place])])
        return growing
