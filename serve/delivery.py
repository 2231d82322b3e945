"""Engine events to the sessions they concern, in rounds that leave the event loop and the engine room to breathe."""

from __future__ import annotations

import asyncio
import time

from resin import FinishReason
from resin.events import FinishedEvent
from serve.actor import EngineActor, Job, Rejected

REST_PER_BUSY = 1.0
"""Seconds of rest after each second that a round kept the loop busy. Under load the rounds grow apart and each carries
several tokens a client, instead of the loop taking the interpreter away from the engine's thread."""


class Delivery:
    """Empties an actor's outbox on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._actor: EngineActor | None = None
        self._is_scheduled = False
        self.rounds = 0

    def attach(self, actor: EngineActor) -> None:
        self._actor = actor

    def wake(self) -> None:
        """Called by the actor on its own thread after it has put something into the outbox."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._run_round)

    def fail_all(self, error: BaseException) -> None:
        """Ends every job that the engine left without an ending."""
        self.empty_outbox()
        actor = self._actor
        assert actor is not None
        for job in list(actor.jobs.values()):
            self._finish(job, FinishReason.ERROR, error)
        actor.jobs.clear()

    def empty_outbox(self) -> None:
        actor = self._actor
        assert actor is not None
        while actor.outbox:
            item = actor.outbox.popleft()
            if isinstance(item, Rejected):
                self._finish(item.job, item.reason, item.error)
                continue
            for event in item:
                if isinstance(event, FinishedEvent):
                    job = actor.jobs.pop(event.request.id, None)
                    if job is not None:
                        self._finish(job, event.reason, event.request.error)
                    continue
                token_ids, bounds = event.token_ids.tolist(), event.token_indptr.tolist()
                for index, request in enumerate(event.requests):
                    job = actor.jobs.get(request.id)
                    if job is not None:
                        begin = bounds[index]
                        job.receiver.on_tokens(token_ids[begin : bounds[index + 1]], event, begin)

    def _finish(self, job: Job, reason: FinishReason, error: BaseException | None) -> None:
        job.is_done = True
        job.receiver.on_finish(reason, error)

    def _run_round(self) -> None:
        started = time.perf_counter()
        self.rounds += 1
        try:
            self.empty_outbox()
        finally:
            # The sessions just woken run before this: the loop keeps the order of its callbacks.
            self._loop.call_soon(self._rest, started)

    def _rest(self, started: float) -> None:
        busy_s = time.perf_counter() - started
        self._loop.call_later(busy_s * REST_PER_BUSY, self._end_round)

    def _end_round(self) -> None:
        self._is_scheduled = False
        assert self._actor is not None
        if self._actor.outbox and not self._is_scheduled:
            self._is_scheduled = True
            self._run_round()
