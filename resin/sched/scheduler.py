"""Scheduler: which requests run next, on which pages, in which plan.

`plan_next` admits, chooses the phase, reserves pages and builds a plan; the Engine then calls `accept` or `rollback`,
and later `commit` with the runner's output. Policy: docs/scheduling.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from resin.plan import Bucket, Phase, RunnerConfig, smallest_bucket
from resin.sched.cache import CacheManager, OutOfPages, Reservation
from resin.sched.fill import fill_tokens, prefill_costs
from resin.sched.masks import allowed_masks
from resin.sched.planner import Chunk, Planner
from resin.sched.policy import Policy
from resin.sched.queue import RequestQueue
from resin.sched.request import Request, RequestState
from resin.sched.rows import DecodeRows
from resin.sched.slots import ACCEPTED, SlotTable
from resin.sched.step import PlannedStep

_EXACT = 1 << 30  # plans of exact size have no bucket to stay in


class Scheduler:
    """Owns the queue, the slots and the cache of one engine."""

    def __init__(self, config: RunnerConfig, cache: CacheManager, policy: Policy) -> None:
        self.config = config
        self.cache = cache
        self.policy = policy
        self.queue = RequestQueue(policy.aging_s)
        self.table = SlotTable(config.max_sequences, config.count_rows)
        self.prefilling: list[Request] = []  # by rank
        self.decoding: list[Request] = []
        self.closing: set[Request] = set()  # ended, but a plan in flight still holds a row
        self.failures: deque[tuple[Request, Exception]] = deque()  # requests that cannot go on, and why
        self.retractions = 0
        self.prefill_streak = 0  # bucket tokens of prefill plans since rows that decode had their last step
        self.streak_tokens = policy.prefill_streak_tokens or _EXACT  # at which it is their turn; set by the Engine
        self.prefill_costs = prefill_costs(config, None)  # measured ones are set by the Engine
        self.planner = Planner(config, self.table, cache.paged)
        self._step = 0
        prefill, decode = config.of_phase(Phase.PREFILL), config.of_phase(Phase.DECODE)
        limit = max((bucket.tokens for bucket in prefill), default=config.max_plan_tokens)
        self.max_plan_tokens = min(limit, config.max_plan_tokens, policy.max_plan_tokens or limit)
        self._max_prefill_rows = max((bucket.sequences for bucket in prefill), default=config.max_sequences)
        self._max_decode_rows = max((bucket.sequences for bucket in decode), default=config.max_sequences)
        self._room_changed = True
        spans = [group.span_tokens for group in cache.paged]
        if cache.seals_states:
            spans.append(cache.checkpoint_tokens)
        # For each decode bucket the sequences of the next smaller one: with more rows than that it is not too large.
        sizes = sorted({0, *(bucket.sequences for bucket in decode)})
        self._smaller = {bucket: sizes[sizes.index(bucket.sequences) - 1] for bucket in decode}
        self.rows = DecodeRows(self.table, self._max_decode_rows, spans)
        self._joining: list[Request] = []  # requests that decode, but have no place yet
        self._takes_turns = False  # whether more rows decode than one plan holds

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.queue.push(request)
        self.note_room()

    def note_room(self) -> None:
        """There may be room, or another request in front: the next step looks at the queue again."""
        self._room_changed = True

    def running(self) -> Iterator[Request]:
        """Requests that hold a slot and go on."""
        yield from self.prefilling
        yield from self.decoding

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def finish(self, request: Request, *, is_sound: bool = True) -> None:
        """Ends a waiting or running request; its pages return now, or when the last plan that holds it is collected.

        Args:
            is_sound: False if what it computed is worth nothing to others.
        """
        if request.state is RequestState.QUEUED:
            self.queue.remove(request, RequestState.FINISHED)
            self.note_room()  # it may have been the one that blocked the others
            return
        self._leave(request)
        request.state = RequestState.FINISHED
        if not is_sound and request.lease is not None:
            request.lease.is_sound = False
        if self.table.in_flight[request.slot]:
            self.closing.add(request)
        else:
            self._free(request)

    def abandon(self) -> list[Request]:
        """Ends every request; those that ran keep their slots and pages, as what these hold is unknown."""
        requests = [*self.queue.waiting(), *self.running()]
        for request in requests:
            if request.state is RequestState.QUEUED:
                self.queue.remove(request, RequestState.FINISHED)
            request.state = RequestState.FINISHED
        self.prefilling, self.decoding = [], []
        return requests

    def _leave(self, request: Request) -> None:
        if request.state is RequestState.PREFILL:
            self.prefilling.remove(request)
            return
        self.decoding.remove(request)
        if request in self.rows:
            self.rows.leave(self.rows.place(request))
        elif request in self._joining:
            self._joining.remove(request)

    def _free(self, request: Request) -> None:
        slot = request.slot
        self.cache.release(request, min(int(self.table.committed[slot]), int(self.table.known[slot])))
        self.table.give_back(request)
        self.note_room()

    def release_closed(self, request: Request) -> None:
        """A plan with a row of an ended request was collected: free its pages if it was the last one."""
        if request in self.closing and not self.table.in_flight[request.slot]:
            self.closing.remove(request)
            self._free(request)

    def rows_changed(self, request: Request) -> None:
        """The next decode plan must read the request's page rows again."""
        if request in self.rows:
            self.rows.dirty.add(self.rows.place(request))

    # -- planning -----------------------------------------------------------------------------------------------

    def plan_next(self, *, in_flight: bool) -> PlannedStep | None:
        """The next plan with its pages reserved, or None if nothing can run before plans in flight are collected."""
        self._admit()
        decode_is_due = self.prefill_streak >= self.streak_tokens and bool(self._decodable())
        while self.prefilling and not decode_is_due:
            planned = self._plan_prefill()
            if planned is not None:
                return planned
            # No room. Whoever ranks worst makes some, unless that is the request that wants it.
            if self._youngest() is self.prefilling[0]:
                break
            if in_flight:
                return None
            self._retract_youngest()
        planned = self._plan_decode(in_flight)
        if planned is None and not in_flight and self.prefilling:
            planned = self._plan_prefill()  # on the pages of the decoding rows, all retracted just now
        if planned is None and not in_flight:
            self._give_up_on_one()
        return planned

    def _give_up_on_one(self) -> None:
        """Nothing can be planned and nothing is in flight: the best-ranked request fails, so that others go on."""
        request = min(self.running(), key=lambda request: (request.rank, request.id), default=None)
        if request is not None:
            assert request.lease is not None
            held, pool = len(request.lease.pages()), self.cache.pool
            error = OutOfPages(
                f"no room for the next of {request.num_tokens} tokens: it holds {held} of {pool.total} pages, and "
                f"{self.cache.available} are left"
            )
            self.failures.append((request, error))

    def accept(self, planned: PlannedStep) -> None:
        """The runner took the plan: what it computes and emits counts from now on."""
        self._step += 1
        table, slots = self.table, planned.slots
        if planned.rows is not None:
            self.prefill_streak = 0
            table.add(planned.rows.slots, planned.rows.runs, ACCEPTED)
            self.rows.steps += 1
            if self._takes_turns:
                table.last_step[slots] = self._step
            return
        assert planned.chunks is not None
        if self.decoding:
            self.prefill_streak += planned.plan.bucket.tokens
        table.in_flight[slots] += 1
        for chunk in planned.chunks:
            slot = chunk.request.slot
            table.computed[slot] = chunk.stop
            if chunk.emits:
                table.pending[slot] += 1
                self.prefilling.remove(chunk.request)
                self.decoding.append(chunk.request)
                self._joining.append(chunk.request)
                chunk.request.state = RequestState.DECODE

    def rollback(self, planned: PlannedStep) -> None:
        """The plan never ran: its pages return and everything is as before."""
        self.cache.rollback(planned.reservation)
        self.planner.image = None

    def _admit(self) -> None:
        """Moves waiting requests into slots, best rank first, while their whole known sequence has room."""
        while self.table.free and (self._room_changed or not self.num_running):
            request = self.queue.peek()
            if request is None or not self.table.has_room(request):
                return
            lease = request.lease = self.cache.prefixes.lease(request)
            held = sum(len(row) for row in lease.rows)
            need = self.cache.pages_needed(request.num_tokens + 1, self.max_plan_tokens) - held
            if self.config.groups and self.num_running and not self._has_room(need):
                self.cache.release(request)
                if not request.retractions:
                    request.prefix_audit = None  # the admission to come sets it
                self._room_changed = False
                return
            self.queue.pop()
            self.table.take(request)
            self.table.computed[request.slot] = self.table.committed[request.slot] = lease.published_tokens
            request.state = RequestState.PREFILL
            self._insert_by_rank(request)

    def _insert_by_rank(self, request: Request) -> None:
        at = len(self.prefilling)
        while at and (self.prefilling[at - 1].rank, self.prefilling[at - 1].id) > (request.rank, request.id):
            at -= 1
        self.prefilling.insert(at, request)

    def _has_room(self, need: int) -> bool:
        """True if `need` pages are there beyond those that admitted requests will take."""
        if need + self._promised_pages() <= self.cache.available:
            return True
        return self._cycle_rows() and need + self._promised_pages() <= self.cache.available

    def _cycle_rows(self) -> bool:
        """Takes the Window pages that nobody can see any more from every row at hand; False if there are none.

        Rows that grow are cycled then. The others may keep a page, after prefill a whole chunk's, until room is short.
        """
        freed = False
        for request in self.running():
            assert request.lease is not None
            if self.cache.cycle(request.lease, int(self.table.committed[request.slot])):
                self.rows_changed(request)
                freed = True
        return freed

    def _promised_pages(self) -> int:
        """Pages that admitted requests still need for their known tokens, and one each for rows that decode."""
        promised = len(self.decoding)
        for request in self.prefilling:
            assert request.lease is not None
            need = self.cache.pages_needed(request.num_tokens + 1, self.max_plan_tokens)
            promised += max(need - sum(len(row) for row in request.lease.rows), 0)
        return promised

    def _decodable(self) -> list[Request]:
        """Rows that can decode: no plan in flight may end them, and no mask waits for a token still in flight."""
        table, slots = self.table, np.array([request.slot for request in self.decoding], np.int32)
        stays = table.outputs[slots] + table.pending[slots] >= table.max_outputs[slots]
        stays |= table.constrained[slots] & (table.pending[slots] > 0)
        if not stays.any():
            return self.decoding
        return [request for request, stay in zip(self.decoding, stays.tolist(), strict=True) if not stay]

    # -- prefill ------------------------------------------------------------------------------------------------

    def _plan_prefill(self) -> PlannedStep | None:
        """None, and nothing reserved, if not even one token of the best-ranked request finds room."""
        reservation = Reservation()
        try:
            chunks, bucket = self._choose_chunks(reservation)
            return self._prefill_step(reservation, chunks, bucket) if bucket is not None else None
        except BaseException:
            self.cache.rollback(reservation)
            raise

    def _prefill_step(self, reservation: Reservation, chunks: list[Chunk], bucket: Bucket) -> PlannedStep:
        emitting = [chunk.request for chunk in chunks if chunk.emits]
        masks = allowed_masks(emitting, self.config.vocab_size, self.failures)
        plan = self.planner.plan_prefill(self._step, bucket, chunks, masks)
        requests = [chunk.request for chunk in chunks]
        slots = np.fromiter((request.slot for request in requests), np.int32, len(requests))
        return PlannedStep(plan, reservation, slots, requests, chunks, None)

    def _choose_chunks(self, reservation: Reservation) -> tuple[list[Chunk], Bucket | None]:
        """Chunks by rank under the token budget, with their pages; stops at the first that finds no room."""
        chunks: list[Chunk] = []
        bucket: Bucket | None = None
        budget = most = self._prefill_budget()
        pages = [0] * len(self.cache.paged)
        for request in self.prefilling[: self._max_prefill_rows]:
            slot = request.slot
            start, known = int(self.table.computed[slot]), int(self.table.known[slot])
            stop = self._chunk_stop(start, known, budget)
            while stop > start:
                assert request.lease is not None
                wider = [have + self._row_pages(request, group, start, stop) for group, have in enumerate(pages)]
                used = most - budget + stop - start
                fits = smallest_bucket(
                    self.config.buckets, Phase.PREFILL, len(chunks) + 1, used, self.planner.row_pages(wider)
                )
                if fits is not None and self._try_extend(request, start, stop, reservation):
                    chunks.append(Chunk(request, start, stop, stop == known))
                    bucket, pages, budget = fits, wider, budget - (stop - start)
                    break
                if chunks:
                    return chunks, bucket
                stop = start + (stop - start) // 2
            if budget <= 0 or stop <= start:
                break
        return chunks, bucket

    def _prefill_budget(self) -> int:
        """Tokens of the next prefill plan: no more than rows that decode wait for, cut where its bucket is full."""
        left = self.streak_tokens - self.prefill_streak if self.decoding else self.max_plan_tokens
        most = min(self.max_plan_tokens, left if left > 0 else self.streak_tokens)
        return fill_tokens(min(most, self.table.waiting(self.prefilling[: self._max_prefill_rows])), self.prefill_costs)

    def _try_extend(self, request: Request, start: int, stop: int, reservation: Reservation) -> bool:
        """Reserves what the request needs to compute tokens `[start, stop)`; all or nothing."""
        lease, committed = request.lease, int(self.table.committed[request.slot])
        assert lease is not None
        return self.cache.try_extend(lease, committed, start, stop, reservation) or (
            self._cycle_rows() and self.cache.try_extend(lease, committed, start, stop, reservation)
        )

    def _chunk_stop(self, start: int, known: int, budget: int) -> int:
        stop = min(known, start + budget)
        if self.cache.seals_states:
            checkpoint = (start // self.cache.checkpoint_tokens + 1) * self.cache.checkpoint_tokens
            stop = min(stop, checkpoint)
        return stop

    def _row_pages(self, request: Request, index: int, start: int, stop: int) -> int:
        """Pages of a paged group's plan row for computing tokens `[start, stop)`."""
        assert request.lease is not None
        group = self.cache.paged[index]
        return -(-stop // group.span_tokens) - max(request.lease.rows[index].first, group.first_needed(start))

    # -- decode -------------------------------------------------------------------------------------------------

    def _plan_decode(self, in_flight: bool) -> PlannedStep | None:
        rows, cache = self.rows, self.cache
        while True:
            self._settle()
            if not rows.num_live:
                return None
            bucket, growing = self._decode_bucket()
            if bucket is None:  # decode as many rows as a bucket holds, the others next time
                self._seat(self._decodable())
                bucket, growing = self._decode_bucket()
                assert bucket is not None, "every request was let in because it fits alone"
            sealing = rows.starting(cache.checkpoint_tokens) if cache.seals_states else []
            reservation = Reservation()
            if self._extend_rows(growing, sealing, reservation):
                break
            if self._cycle_rows():
                continue
            if in_flight or not self._retract_youngest():
                return None
        try:
            rows.dirty.update(sealing)
            masks = self._decode_masks() if rows.constrained else None
            plan = self.planner.plan_decode(self._step, bucket, rows, growing, masks)
        except BaseException:
            cache.rollback(reservation)
            self.planner.image = None
            raise
        rows.dirty.update(sealing)  # the plan after this one reads their states where this one writes them
        live = rows.live()
        return PlannedStep(plan, reservation, live.index, live.requests, None, live, rows.ending())

    def _settle(self) -> None:
        """Gives places to rows that start to decode, takes them from rows whose last token is on its way, and pauses
        rows whose mask waits for a token."""
        rows, table = self.rows, self.table
        for place in rows.finished():
            rows.leave(place)
        if self._takes_turns or len(self._joining) > rows.capacity - rows.count:
            self._seat(self._decodable())
        elif self._joining:
            self._joining = [request for request in self._joining if not self._try_join(request)]
        if rows.constrained:
            waiting = [place for place in rows.constrained if table.pending[rows.request(place).slot]]
            rows.pause(waiting)
        if not self.config.buckets and rows.top > rows.num_live:
            rows.compact()  # exact-size plans have no padding

    def _try_join(self, request: Request) -> bool:
        """False if the request's mask waits for a token in flight."""
        table, slot = self.table, request.slot
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
        for request in self.decoding:
            if request in rows and request not in chosen:
                rows.leave(rows.place(request))
        for request in chosen:
            if request not in rows:
                rows.join(request)
        rows.compact()
        self._joining = [request for request in self.decoding if request not in rows]

    def _growing(self) -> list[list[int]]:
        """For each paged group the places whose rows start a page with their next token."""
        return [self.rows.starting(group.span_tokens) for group in self.cache.paged]

    def _extend_rows(self, growing: list[list[int]], sealing: list[int], reservation: Reservation) -> bool:
        """Reserves room for one more token of every row; all or nothing."""
        rows, leases = self.rows, self.rows.leases
        extended = [[leases[place].rows[index] for place in places] for index, places in enumerate(growing)]  # type: ignore[union-attr]
        seals = [(rows.lease(place), rows.position(place)) for place in sealing]
        committed: list[list[int]] = []  # for each Window group
        for group, places in zip(self.cache.paged, growing, strict=True):
            if group.window_tokens:
                committed.append(self.table.committed[rows.slots[places]].tolist())
        return self.cache.try_extend_rows(extended, committed, seals, reservation)

    def _decode_masks(self) -> np.ndarray | None:
        rows = self.rows
        asked = [rows.request(place) for place in sorted(rows.constrained) if rows.is_live(place)]
        return allowed_masks(asked, self.config.vocab_size, self.failures)

    def _rows_that_fit(self, rows: list[Request]) -> list[Request]:
        """As many of the rows that waited longest for a step as one bucket holds."""
        rows = sorted(rows, key=lambda request: (int(self.table.last_step[request.slot]), request.rank, request.id))
        rows = rows[: self._max_decode_rows]
        starts = [int(self.table.computed[request.slot]) for request in rows]
        pages = [
            [self._row_pages(request, index, start, start + 1) for index in range(len(self.cache.paged))]
            for request, start in zip(rows, starts, strict=True)
        ]
        totals = np.cumsum(pages, axis=0)
        for count in range(len(rows), 1, -1):
            needs = self.planner.row_pages(totals[count - 1])
            if smallest_bucket(self.config.buckets, Phase.DECODE, count, count, needs) is not None:
                return rows[:count]
        return rows[:1]

    def _decode_bucket(self) -> tuple[Bucket | None, list[list[int]]]:
        """The smallest bucket that holds all rows once their next tokens have room, and that of the latest plan while
        none comes or goes; and who grows. Rows move to lower places if that is what it takes."""
        rows, image, buckets, growing = self.rows, self.planner.image, self.config.buckets, self._growing()
        totals = image.pages_next(growing) if image is not None else rows.visible_pages(self.cache.paged, growing)
        needs = totals if not self.cache.state_pages else self.planner.row_pages(totals)
        if image is not None and rows.count > self._smaller.get(image.bucket, _EXACT):
            if image.bucket.holds(rows.top, rows.top, needs):
                return image.bucket, growing
        count = rows.count if buckets else rows.num_live
        best = smallest_bucket(buckets, Phase.DECODE, count, count, needs)
        if best is not None and not best.holds(rows.top, rows.top, needs):
            rows.compact()
            growing = self._growing()
        return best, growing

    # -- memory pressure ----------------------------------------------------------------------------------------

    def _youngest(self) -> Request:
        """The running request of worst rank."""
        return max(self.running(), key=lambda request: (request.rank, request.id))

    def _retract_youngest(self) -> bool:
        """Sends the running request of worst rank back to the queue (no plan is in flight); False if only one runs."""
        if self.num_running < 2:
            return False
        self.retract(self._youngest())
        return True

    def retract(self, request: Request) -> None:
        """Takes a running request's pages and slot; its tokens stay, and it resumes by computing them again."""
        assert not self.table.in_flight[request.slot]
        self._leave(request)
        request.last_token_s = float(self.table.last_token_s[request.slot])
        self._free(request)
        request.retractions += 1
        self.retractions += 1
        self.queue.push(request)
        self._room_changed = False

    def check_integrity(self) -> None:
        """Checks the page counts and the slot table against each other (tests)."""
        holders = [*self.running(), *self.closing]
        slots = [request.slot for request in holders]
        assert len(set(slots)) == len(slots) and len(slots) + self.table.free == self.config.max_sequences
        assert all(self.table.requests[request.slot] is request for request in holders)
        leases = [(request.lease, int(self.table.computed[request.slot])) for request in holders if request.lease]
        assert len(leases) == len(holders)
        self.cache.check_integrity(leases)
