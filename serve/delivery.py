"""Engine events to the receivers they concern, in rounds that keep out of the engine's way.

Both threads need the interpreter, and a step that has to wait for it delays every client. So a round begins when the
engine has nothing to do but wait for its runner, and is over before long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from resin import FinishReason
from resin.events import FinishedEvent
from serve.actor import EngineActor, Job, Receiver, Rejected

ROUND_PER_WAIT = 0.75
"""Seconds that a round may take for each that the engine's last step waited. The receivers that are still to flush then
are left to the next round, where they come first."""

MIN_WAIT_S = 0.0005
"""Below this there is no gap between steps that a round could keep to."""

GAPLESS_ROUND_S = 0.003
"""What a round may take then."""

REST_PER_BUSY = 0.25
"""Seconds of rest after each second that rounds kept the loop busy. An engine that never waits for its runner still
gets the interpreter, and rounds grow apart until each carries several tokens a client."""

PATIENCE_S = 0.005
"""How much longer what is left may wait for the engine's next sign before it is delivered at an odd moment."""


class Delivery:
    """Empties an actor's outbox on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._actor: EngineActor | None = None
        self._is_woken = False
        self._rest_until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._ready: dict[Receiver, None] = {}  # in the order in which they asked to flush

    def attach(self, actor: EngineActor) -> None:
        self._actor = actor

    def wake(self) -> None:
        """Called by the actor on its own thread when something is in the outbox and the interpreter is free."""
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop closed: the server did not wait for a step that hung
                self._loop.call_soon_threadsafe(self._on_wake)

    def fail_all(self, error: BaseException) -> None:
        """Ends every job that the engine left without an ending."""
        self.deliver()
        actor = self._actor
        assert actor is not None
        for job in list(actor.jobs.values()):
            self._finish(job, FinishReason.ERROR, error)
        actor.jobs.clear()
        self.deliver()

    def deliver(self, limit_s: float = math.inf) -> None:
        """Empties the outbox, and lets receivers flush until time is up; half of it is theirs in any case."""
        started_s = self._loop.time()
        self._empty_outbox()
        until_s = max(started_s + limit_s, self._loop.time() + limit_s / 2)
        ready, self._ready = self._ready, {}
        for receiver in ready:
            if self._loop.time() < until_s:
                receiver.flush()
            else:
                self._ready[receiver] = None

    def _empty_outbox(self) -> None:
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
                for request, begin, end in zip(event.requests, bounds, bounds[1:], strict=False):
                    job = actor.jobs.get(request.id)
                    if job is not None and job.receiver.on_tokens(token_ids[begin:end], event, begin):
                        self._ready[job.receiver] = None

    def _finish(self, job: Job, reason: FinishReason, error: BaseException | None) -> None:
        job.is_done = True
        if job.receiver.on_finish(reason, error):
            self._ready[job.receiver] = None

    def _on_wake(self) -> None:
        self._is_woken = False
        if self._loop.time() < self._rest_until_s:
            self._run_later()
        else:
            self._run_round()

    def _run_round(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        assert self._actor is not None
        started_s = self._loop.time()
        try:
            waited_s = self._actor.waited_s
            self.deliver(GAPLESS_ROUND_S if waited_s < MIN_WAIT_S else ROUND_PER_WAIT * waited_s)
        finally:
            now_s = self._loop.time()
            self._rest_until_s = now_s + (now_s - started_s) * REST_PER_BUSY
            if self._ready:
                self._run_later()

    def _run_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(self._rest_until_s + PATIENCE_S, self._run_round)
