"""Requests whose prompts are being computed, and the chunks of their next plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from resin.plan import Bucket, Phase, RunnerConfig
from resin.sched.cache import CacheManager, Reservation
from resin.sched.planner import Chunk, Planner
from resin.sched.request import Request
from resin.sched.slots import SlotTable
from resin.sched.step import Needs, PrefillPart


class Prefilling:
    """The requests of one replica that prefill.

    Args:
        make_room: lets go of pages that nobody sees any more; False if there are none.

    Attributes:
        requests: by rank.
    """

    def __init__(
        self,
        config: RunnerConfig,
        cache: CacheManager,
        table: SlotTable,
        planner: Planner,
        make_room: Callable[[], bool],
    ) -> None:
        self.requests: list[Request] = []
        self._config = config
        self._cache = cache
        self._table = table
        self._planner = planner
        self._make_room = make_room
        buckets = config.of_phase(Phase.PREFILL)
        self._max_rows = max((bucket.sequences for bucket in buckets), default=config.max_sequences)

    def add(self, request: Request) -> None:
        at = len(self.requests)
        while at and (self.requests[at - 1].rank, self.requests[at - 1].id) > (request.rank, request.id):
            at -= 1
        self.requests.insert(at, request)

    def waiting_tokens(self) -> int:
        """What the next plan would compute if no bucket were too small."""
        return self._table.waiting(self.requests[: self._max_rows])

    def reserve(self, most_tokens: int) -> PrefillPart | None:
        """Chunks of at most so many tokens; None, and nothing reserved, if not even one token of the best-ranked
        request finds room."""
        reservation = Reservation()
        try:
            chunks, bucket, needs = self._choose_chunks(reservation, most_tokens)
        except BaseException:
            self._cache.rollback(reservation)
            raise
        if bucket is None:
            return None
        slots = np.fromiter((chunk.request.slot for chunk in chunks), np.int32, len(chunks))
        return PrefillPart(bucket, needs, reservation, chunks, slots)

    def _choose_chunks(self, reservation: Reservation, most: int) -> tuple[list[Chunk], Bucket | None, Needs]:
        """Chunks by rank under the token budget, with their pages; stops at the first that finds no room."""
        chunks: list[Chunk] = []
        bucket: Bucket | None = None
        budget = most
        pages, needs = [0] * len(self._cache.paged), Needs(0, 0, ())
        for request in self.requests[: self._max_rows]:
            slot = request.slot
            start, known = int(self._table.computed[slot]), int(self._table.known[slot])
            stop = self._chunk_stop(start, known, budget)
            while stop > start:
                lease = request.lease
                assert lease is not None
                wider = [have + self._cache.row_pages(lease, group, start, stop) for group, have in enumerate(pages)]
                wants = Needs(len(chunks) + 1, most - budget + stop - start, self._planner.row_pages(wider))
                fits = wants.smallest(self._config.buckets, Phase.PREFILL)
                if fits is not None and self._try_extend(request, start, stop, reservation):
                    chunks.append(Chunk(request, start, stop, stop == known))
                    bucket, needs, pages, budget = fits, wants, wider, budget - (stop - start)
                    break
                if chunks:
                    return chunks, bucket, needs
                stop = start + (stop - start) // 2
            if budget <= 0 or stop <= start:
                break
        return chunks, bucket, needs

    def _try_extend(self, request: Request, start: int, stop: int, reservation: Reservation) -> bool:
        """Reserves what the request needs to compute tokens `[start, stop)`; all or nothing."""
        lease, committed = request.lease, int(self._table.committed[request.slot])
        assert lease is not None
        return self._cache.try_extend(lease, committed, start, stop, reservation) or (
            self._make_room() and self._cache.try_extend(lease, committed, start, stop, reservation)
        )

    def _chunk_stop(self, start: int, known: int, budget: int) -> int:
        stop = min(known, start + budget)
        if self._cache.seals_states:
            checkpoint = (start // self._cache.checkpoint_tokens + 1) * self._cache.checkpoint_tokens
            stop = min(stop, checkpoint)
        return stop
