"""Replica: the requests that run on one arena, and its part of every step.

A step asks each replica what it has to run (`demand`), then for a part with its pages reserved (`reserve`), then for
the plan of that part in the bucket that all replicas share (`fill`). `accept` or `rollback` follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from resin.plan import BatchPlan, Bucket, Phase, RunnerConfig
from resin.sched.admission import Admission
from resin.sched.cache import CacheManager, OutOfPages
from resin.sched.decoding import Decoding
from resin.sched.drafts import DraftPolicy
from resin.sched.masks import allowed_masks
from resin.sched.planner import Planner
from resin.sched.prefilling import Prefilling
from resin.sched.queue import RequestQueue
from resin.sched.request import Request, RequestState
from resin.sched.slots import ACCEPTED, SlotTable
from resin.sched.step import DecodePart, Demand, Part, PrefillPart


class Replica:
    """Owns the slots, the cache and the running requests of one arena.

    Args:
        index: place among the replicas.
        config: of the runner; its limits hold for each replica.
        cache: the arena's pages.
        queue: where retracted requests go.
        failures: receives requests that cannot go on, and why.
        max_plan_tokens: prefill tokens of a plan at most.
        drafts: when a step checks drafts.

    Attributes:
        table, planner: of the arena's slots and plans.
        prefill, decode: the running requests, by phase.
        admission: lets further ones in.
        closing: ended requests of which a plan in flight still holds a row.
        in_flight: accepted plans that are not committed.
        retractions: requests sent back to the queue.
    """

    def __init__(
        self,
        index: int,
        config: RunnerConfig,
        cache: CacheManager,
        queue: RequestQueue,
        failures: deque[tuple[Request, Exception]],
        max_plan_tokens: int,
        drafts: DraftPolicy,
    ) -> None:
        self.index = index
        self.vocab_size, self.draft_tokens = config.vocab_size, config.draft_tokens
        self.cache = cache
        self.table = SlotTable(config.max_sequences, config.count_rows)
        self.planner = Planner(config, self.table, cache.paged)
        self.prefill = Prefilling(config, cache, self.table, self.planner, self._cycle_rows)
        self.drafts = drafts
        self.decode = Decoding(config, cache, self.table, self.planner, drafts)
        self.admission = Admission(cache, self.table, self.prefill, self.decode, max_plan_tokens, self._cycle_rows)
        self.closing: set[Request] = set()
        self.in_flight = 0
        self.retractions = 0
        self._queue = queue
        self._failures = failures
        self._drains = False  # waits for its plans in flight: only then can a request be retracted

    # -- requests -----------------------------------------------------------------------------------------------

    def running(self) -> Iterator[Request]:
        """Requests that hold a slot and go on."""
        yield from self.prefill.requests
        yield from self.decode.requests

    @property
    def num_running(self) -> int:
        return len(self.prefill.requests) + len(self.decode.requests)

    def note_room(self) -> None:
        """There may be room, or another request in front: the next step looks at the queue again."""
        self.admission.room_changed = True

    def admit(self, request: Request) -> None:
        """A request that `admission` let in, out of the queue by now, begins to prefill."""
        request.home = self.index
        request.state = RequestState.PREFILL
        self.prefill.add(request)

    def finish(self, request: Request, *, is_sound: bool = True) -> None:
        """Ends a running request; its pages return now, or when the last plan that holds it is collected.

        Args:
            is_sound: False if what it computed is worth nothing to others.
        """
        self._leave(request)
        request.state = RequestState.FINISHED
        if not is_sound and request.lease is not None:
            request.lease.is_sound = False
        if self.table.in_flight[request.slot]:
            self.closing.add(request)
        else:
            self._free(request)

    def abandon(self) -> list[Request]:
        """Ends every running request; they keep their slots and pages, as what these hold is unknown."""
        requests = list(self.running())
        for request in requests:
            request.state = RequestState.FINISHED
        self.prefill.requests, self.decode.requests = [], []
        return requests

    def release_closed(self, request: Request) -> None:
        """A plan with a row of an ended request was collected: free its pages if it was the last one."""
        if request in self.closing and not self.table.in_flight[request.slot]:
            self.closing.remove(request)
            self._free(request)

    def _leave(self, request: Request) -> None:
        if request.state is RequestState.PREFILL:
            self.prefill.requests.remove(request)
        else:
            self.decode.remove(request)

    def _free(self, request: Request) -> None:
        slot = request.slot
        self.cache.release(request, min(int(self.table.committed[slot]), int(self.table.known[slot])))
        self.table.give_back(request)
        self.note_room()

    # -- steps --------------------------------------------------------------------------------------------------

    def demand(self) -> Demand:
        """What could run in the next step."""
        self._drains = False
        prefill, decode = bool(self.prefill.requests), bool(self.decode.requests)
        return Demand(prefill, decode and (not prefill or bool(self.decode.ready())))

    def reserve(self, phase: Phase, most_tokens: int) -> Part | None:
        """The replica's part of a step with its pages reserved, making room if it must; None if it has none.

        Args:
            phase: of the step.
            most_tokens: of a prefill step.
        """
        if self._drains:
            return None
        part = self._reserve_prefill(most_tokens) if phase is Phase.PREFILL else self._reserve_decode()
        if part is None and not self.in_flight and self.num_running == 1:
            (request,) = self.running()
            if request.state is (RequestState.PREFILL if phase is Phase.PREFILL else RequestState.DECODE):
                self._failures.append((request, _no_room(request, self.cache)))
        return part

    def _reserve_prefill(self, most_tokens: int) -> PrefillPart | None:
        while self.prefill.requests:
            part = self.prefill.reserve(most_tokens)
            if part is not None:
                return part
            # No room. Whoever ranks worst makes some, unless that is the request that wants it.
            if self._youngest() is self.prefill.requests[0] or not self._retract_youngest():
                break
        return None

    def _reserve_decode(self) -> DecodePart | None:
        while self.decode.settle():
            part = self.decode.reserve()
            if part is not None:
                return part
            if not self._cycle_rows() and not self._retract_youngest():
                break
        return None

    def fill(self, part: Part | None, bucket: Bucket, step: int) -> BatchPlan:
        """The plan of a part, empty without one, in a bucket that holds it."""
        if isinstance(part, DecodePart):
            return self._fill_decode(part, bucket, step)
        if part is None:
            return self.planner.plan_nothing(step, bucket)
        emitting = [chunk.request for chunk in part.chunks if chunk.emits]
        masks = allowed_masks(emitting, self.vocab_size, self._failures)
        return self.planner.plan_prefill(step, bucket, part.chunks, masks)

    def _fill_decode(self, part: DecodePart, bucket: Bucket, step: int) -> BatchPlan:
        rows, masks = self.decode.rows, None
        rows.dirty.update(part.sealing)
        if rows.constrained:
            asked = [rows.request(place) for place in sorted(rows.constrained) if rows.is_live(place)]
            masks = allowed_masks(asked, self.vocab_size, self._failures)
        plan = self.planner.plan_decode(step, bucket, rows, part.growing, masks, part.drafts)
        rows.dirty.update(part.sealing)  # the plan after this one reads their states where this one writes them
        return plan

    def accept(self, part: Part) -> None:
        """The runner took the part's plan: what it computes and emits counts from now on."""
        self.in_flight += 1
        table = self.table
        if isinstance(part, DecodePart):
            table.add(part.rows.slots, part.rows.runs, ACCEPTED)
            self.decode.accept(part)
            return
        table.in_flight[part.slots] += 1
        for chunk in part.chunks:
            request = chunk.request
            table.computed[request.slot] = chunk.stop
            if chunk.emits:
                table.pending[request.slot] += 1
                self.prefill.requests.remove(request)
                request.state = RequestState.DECODE
                self.decode.add(request)

    def rollback(self, part: Part) -> None:
        """The part's plan never ran: its pages return and everything is as before."""
        self.cache.rollback(part.reservation)
        self.planner.image = None

    # -- room ---------------------------------------------------------------------------------------------------

    def _cycle_rows(self) -> bool:
        """Takes the Window pages that nobody can see any more from every row at hand; False if there are none.

        Rows that grow are cycled then. The others may keep a page, after prefill a whole chunk's, until room is short.
        """
        freed = False
        for request in self.running():
            assert request.lease is not None
            if self.cache.cycle(request.lease, int(self.table.committed[request.slot])):
                self.decode.rows_changed(request)
                freed = True
        return freed

    def _youngest(self) -> Request:
        """The running request of worst rank."""
        return max(self.running(), key=lambda request: (request.rank, request.id))

    def _retract_youngest(self) -> bool:
        """Sends the running request of worst rank back to the queue; False if only one runs, or plans are in flight
        and have to be collected first."""
        if self.in_flight:
            self._drains = True
            return False
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
        self._queue.push(request)
        self.admission.room_changed = False

    def check_integrity(self) -> None:
        """Checks the page counts and the slot table against each other (tests)."""
        holders = [*self.running(), *self.closing]
        slots = [request.slot for request in holders]
        assert len(set(slots)) == len(slots) and len(slots) + self.table.free == len(self.table.requests) - 1
        assert all(self.table.requests[request.slot] is request for request in holders)
        assert all(request.home == self.index for request in holders)
        leases = [(request.lease, int(self.table.computed[request.slot])) for request in holders if request.lease]
        assert len(leases) == len(holders)
        self.cache.check_integrity(leases)


def _no_room(request: Request, cache: CacheManager) -> OutOfPages:
    """Why the only running request cannot go on, though nothing is in flight."""
    assert request.lease is not None
    return OutOfPages(
        f"no room for the next of {request.num_tokens} tokens: it holds {len(request.lease.pages())} of "
        f"{cache.pool.total} pages, and {cache.available} are left"
    )
