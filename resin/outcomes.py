"""Outcomes: what becomes of requests, noted on them and in metrics, and told as events."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from resin.events import Event, FinishedEvent, TokensEvent
from resin.metrics import EngineMetrics
from resin.plan import Phase
from resin.sched.commit import Committed
from resin.sched.request import FinishReason, Request
from resin.sched.scheduler import Scheduler


class Outcomes:
    """The events that nobody has fetched yet, and the deadlines to come.

    Attributes:
        live: requests that have not ended.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics | None, clock: Callable[[], float]) -> None:
        self.live = 0
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._events: list[Event] = []
        self._deadlines: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._events)

    def drain(self) -> Sequence[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def expect(self, request: Request) -> None:
        """A request was taken."""
        self.live += 1
        if request.deadline_at_s is not None:
            if len(self._deadlines) > 2 * self.live + 64:  # mostly those of requests that ended long before
                self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_at_s, request.id, request))
        if self._metrics is not None:
            self._metrics.on_submit(request)

    def expire(self) -> None:
        """Ends the requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                self.finish(request, FinishReason.DEADLINE)

    def publish(self, committed: Committed) -> None:
        """Tells of a plan's tokens, and ends the requests that ended with them."""
        now, plan, output = self._clock(), committed.plan, committed.output
        count = len(committed.requests)
        if count:
            requests, tokens, indptr = tuple(committed.requests), committed.token_ids, committed.indptr
            indptr = np.arange(count + 1) if indptr is None else indptr
            picked: list[np.ndarray | None] = []
            if plan.wants_logprobs:
                columns = (output.logprobs, output.top_ids, output.top_logprobs)
                picked = [None if column is None else np.asarray(column)[committed.rows] for column in columns]
            self._events.append(TokensEvent(requests, tokens, indptr, *picked))
        if plan.phase is Phase.PREFILL:
            for request in committed.requests:
                if request.first_token_s is None:
                    request.first_token_s = now
        if self._metrics is not None:
            self._metrics.on_tokens(committed, now)
        committed.stamp(now)
        for request, reason in committed.finished:
            self.finish(request, reason)
        for request, error in committed.failed:
            self.finish(request, FinishReason.ERROR, error)

    def finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        """Ends a request, unless it has ended."""
        if request.finish_reason is not None:
            return
        if not request.is_finished:
            self._scheduler.finish(request, is_sound=reason is not FinishReason.ERROR)
        request.finish_reason, request.error = reason, error
        request.finished_s = self._clock()
        self.live -= 1
        self._events.append(FinishedEvent(request, reason))
        if self._metrics is not None:
            self._metrics.on_finish(request)
