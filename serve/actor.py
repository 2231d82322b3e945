"""The engine's own thread: a bounded queue in front of it, and its events on their way back to the event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from resin import Engine, FinishReason, Request, SamplingParams
from resin.events import Event, FinishedEvent, TokensEvent
from resin.plan import InvalidRequest, PlanRejected

_LOG = logging.getLogger("resin.serve")

MAX_REJECTED_STEPS = 100
"""Plans that a runner may refuse one after another before that counts as a failure."""


class QueueFull(Exception):
    """The intake queue holds `request_queue_capacity` jobs."""


class NotAccepting(Exception):
    """The actor is stopping or has failed."""


class Receiver(Protocol):
    """Gets a job's outcome, on the event loop's thread."""

    def on_tokens(self, token_ids: list[int], event: TokensEvent, begin: int) -> bool:
        """The job's new tokens; their logprobs are the rows of the event's columns from `begin` on.

        True asks for a call of `flush`.
        """
        ...

    def on_finish(self, reason: FinishReason, error: BaseException | None) -> bool:
        """Nothing follows. An InvalidRequest as error means that the engine did not take the job."""
        ...

    def flush(self) -> None:
        """Passes on what has come, once a round has brought what it has for everybody."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """One request on its way through the queue and the engine."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    receiver: Receiver
    cache_salt: str = ""
    priority: float = 0.0
    replica: int | None = None  # to run on; None for any
    request: Request | None = None  # set by the actor on admission
    is_done: bool = False  # set on the event loop's thread


@dataclass(frozen=True, slots=True)
class Rejected:
    """A job that ended without reaching the engine."""

    job: Job
    reason: FinishReason
    error: BaseException | None = None


class EngineActor:
    """Runs an engine on one thread of its own.

    `submit` and `cancel` may be called from any thread and never wait for the engine. What the engine says is put
    into `outbox`, and `wake` is called (on the actor's thread) when nothing but the runner has work to do: whoever
    empties the outbox then has the interpreter to himself.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        queue_capacity: int,
        max_active: int,
        admissions_per_step: int,
        stall_timeout_s: float,
        wake: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self.outbox: deque[Sequence[Event] | Rejected] = deque()
        self.jobs: dict[int, Job] = {}  # by Request.id: entered on admission, taken out by whoever empties the outbox
        self.active = 0
        self.waited_s = 0.0  # how much of the last step left the interpreter to others
        self._queue: dict[int, Job] = {}  # by id(job), in order of arrival
        self._cancelled: deque[Job] = deque()
        self._capacity = queue_capacity
        self._max_active = max_active
        self._admissions_per_step = admissions_per_step
        self._stall_timeout_s = stall_timeout_s
        self._stepped_at_s = time.monotonic()  # when the thread last had nothing or something new to do
        self._wake = wake
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._accepts = True
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="resin-engine", daemon=True)

    @property
    def queued(self) -> int:
        """Jobs that wait for admission."""
        return len(self._queue)

    @property
    def step_age_s(self) -> float:
        """How long the engine's current step has taken so far; 0 while nothing is active."""
        return time.monotonic() - self._stepped_at_s if self.active else 0.0

    @property
    def is_stalled(self) -> bool:
        """True once a step takes longer than `stall_timeout_s`."""
        return self.step_age_s > self._stall_timeout_s

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self.engine.before_wait = self._announce
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues all of the jobs or none.

        Raises:
            QueueFull: not all of them fit.
            NotAccepting: after `close_intake`, `stop` or a failure.
        """
        with self._changed:
            if not self._accepts:
                raise NotAccepting
            if len(self._queue) + len(jobs) > self._capacity:
                raise QueueFull
            self._queue.update((id(job), job) for job in jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Ends a job wherever it is; one that has ended is left alone. Nobody hears of one that still waited."""
        with self._changed:
            if self._queue.pop(id(job), None) is None:
                self._cancelled.append(job)
                self._changed.notify()

    def close_intake(self) -> None:
        """Refuses further jobs; those in the queue still run."""
        with self._changed:
            self._accepts = False

    def stop(self) -> None:
        """Ends everything after the current step, and then the thread."""
        with self._changed:
            self._accepts = False
            self._stops = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._fail(error)

    def _work(self) -> None:
        rejected = 0
        while True:
            self._wait_for_work()
            self._stepped_at_s = time.monotonic()
            if self._stops:
                break
            self._cancel_jobs()
            self._admit()
            if not self.engine.has_work():
                continue
            started_s, cpu_started_s = time.perf_counter(), time.thread_time()
            try:
                events = self.engine.step()
                rejected = 0
            except PlanRejected:
                rejected += 1
                if rejected > MAX_REJECTED_STEPS:
                    raise
                self._announce()
                time.sleep(0.001 * rejected)
                continue
            self._publish(events)
            taken_s = time.perf_counter() - started_s
            self.waited_s = taken_s - (time.thread_time() - cpu_started_s)
            if 2 * self.waited_s < taken_s:
                # A step that hardly waits would keep the interpreter from the event loop. After any other step the
                # loop has to wait for the next plan to be on its way: that gap is what clients would feel.
                time.sleep(0)
        self.engine.close()
        self._publish(self.engine.drain_events())
        for job in self._take_queue():
            self._reject(job, FinishReason.CANCELLED)
        self._announce()

    def _wait_for_work(self) -> None:
        if self._stops or self._queue or self._cancelled or self.engine.has_work():
            return
        self._announce()
        with self._changed:
            while not (self._stops or self._queue or self._cancelled):
                self._changed.wait()

    def _cancel_jobs(self) -> None:
        while self._cancelled:
            job = self._cancelled.popleft()
            if job.request is not None:  # else the engine did not take it
                self.engine.cancel(job.request)

    def _admit(self) -> None:
        for _ in range(min(self._admissions_per_step, self._max_active - self.active)):
            with self._changed:
                if not self._queue:
                    return
                job = self._queue.pop(next(iter(self._queue)))
                self.active += 1  # at no moment is it in neither count
            try:
                job.request = self.engine.submit(
                    job.prompt_ids,
                    sampling_params=job.params,
                    priority=job.priority,
                    cache_salt=job.cache_salt,
                    replica=job.replica,
                )
            except InvalidRequest as error:
                self.active -= 1
                self._reject(job, FinishReason.ERROR, error)
                continue
            self.jobs[job.request.id] = job

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self.active -= sum(type(event) is FinishedEvent for event in events)
            self.outbox.append(events)

    def _announce(self) -> None:
        if self.outbox:
            self._wake()

    def _reject(self, job: Job, reason: FinishReason, error: BaseException | None = None) -> None:
        self.outbox.append(Rejected(job, reason, error))

    def _take_queue(self) -> list[Job]:
        with self._changed:
            jobs = list(self._queue.values())
            self._queue.clear()
        return jobs

    def _fail(self, error: BaseException) -> None:
        """The engine cannot go on: everybody hears of it, and nobody is let in any more."""
        with self._changed:
            self._accepts = False
        _LOG.critical("engine thread ended", exc_info=error)
        self._publish(self.engine.drain_events())
        for job in self._take_queue():
            self._reject(job, FinishReason.ERROR, error)
        self._announce()
        self._on_failure(error)
