"""Admission: whether a waiting request gets a slot and pages of an arena."""

from __future__ import annotations

from collections.abc import Callable

from resin.plan import InvalidRequest, Phase, RunnerConfig, smallest_bucket
from resin.sched.cache import CacheManager
from resin.sched.decoding import Decoding
from resin.sched.planner import Planner
from resin.sched.prefilling import Prefilling
from resin.sched.request import Request
from resin.sched.slots import SlotTable


class Admission:
    """Lets requests in while their whole known sequence has room beside what those that run will take.

    Args:
        prefill, decode: who runs.
        max_plan_tokens: prefill tokens of a plan at most.
        make_room: lets go of pages that nobody sees any more; False if there are none.

    Attributes:
        room_changed: since a request found no room there may be some, or another request in front.
    """

    def __init__(
        self,
        cache: CacheManager,
        table: SlotTable,
        prefill: Prefilling,
        decode: Decoding,
        max_plan_tokens: int,
        make_room: Callable[[], bool],
    ) -> None:
        self.room_changed = True
        self._cache = cache
        self._table = table
        self._prefill = prefill
        self._decode = decode
        self._max_plan_tokens = max_plan_tokens
        self._make_room = make_room

    @property
    def is_open(self) -> bool:
        """False if no slot is free, or nothing has changed since a request found no room."""
        return bool(self._table.free) and (self.room_changed or not self._is_busy)

    @property
    def _is_busy(self) -> bool:
        return bool(self._prefill.requests or self._decode.requests)

    def try_admit(self, request: Request) -> bool:
        """Gives the request a slot, and a lease that starts with its cached prefix."""
        cache, table = self._cache, self._table
        if not table.has_room(request):
            return False
        lease = request.lease = cache.prefixes.lease(request)
        held = sum(len(row) for row in lease.rows)
        need = cache.pages_needed(request.num_tokens + 1, self._max_plan_tokens) - held
        if cache.has_groups and self._is_busy and not self._has_room(need):
            cache.release(request)
            if not request.retractions:
                request.prefix_audit = None  # the admission to come sets it
            self.room_changed = False
            return False
        table.take(request)
        table.computed[request.slot] = table.committed[request.slot] = lease.published_tokens
        return True

    def _has_room(self, need: int) -> bool:
        """True if `need` pages are there beyond those that admitted requests will take."""
        if need + self._promised_pages() <= self._cache.available:
            return True
        return self._make_room() and need + self._promised_pages() <= self._cache.available

    def _promised_pages(self) -> int:
        """Pages that admitted requests still need for their known tokens, and one each for rows that decode."""
        promised = len(self._decode.requests)
        for request in self._prefill.requests:
            assert request.lease is not None
            need = self._cache.pages_needed(request.num_tokens + 1, self._max_plan_tokens)
            promised += max(need - sum(len(row) for row in request.lease.rows), 0)
        return promised


def check_context(config: RunnerConfig, cache: CacheManager, planner: Planner, context_length: int) -> None:
    """Every request that is let in must be able to run alone.

    Raises:
        InvalidRequest: a sequence of that many tokens does not fit the pages, or no bucket.
    """
    need, pages = cache.pages_needed(context_length, 1), cache.pool.total
    if need > pages:
        raise InvalidRequest("context_length", context_length, f"one sequence to fit {pages} pages (it needs {need})")
    row_pages = planner.row_pages(cache.row_pages_needed(context_length, 1))
    for phase in Phase:
        if smallest_bucket(config.buckets, phase, 1, 1, row_pages) is None:
            raise InvalidRequest("buckets", phase.name, f"a bucket that holds {row_pages} pages of one sequence")
