"""The Engine: requests in, events out, one transaction a step.

reserve -> plan -> accept -> dispatch -> collect -> commit. Whatever fails before accept leaves the engine as it was and
may be retried; whatever fails after it quarantines the engine. Ctrl-C waits for the end of a transaction.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resin.binding import Binding
from resin.events import Event
from resin.health import EngineFailed, Health
from resin.intake import Intake
from resin.interrupts import Uninterrupted
from resin.metrics import EngineMetrics
from resin.outcomes import Outcomes
from resin.plan import (
    Runner,
    SamplingParams,
)
from resin.resolved import ResolvedConfig, resolve
from resin.sched.admission import check_context
from resin.sched.cache import CacheManager
from resin.sched.keys import MediaSpan
from resin.sched.policy import Policy
from resin.sched.request import FinishReason, Request
from resin.sched.scheduler import Scheduler
from resin.sched.step import PlannedStep


class Engine:
    """Owns requests, the cache pool and scheduling; a runner executes its plans. Use from one thread.

    A runner serves one engine at a time: from construction until `close`, or until the engine is quarantined.

    Attributes:
        runner, parts: the runner, and what it offers beside `forward`.
        config: the runner's.
        arena: the pool of pages that the runner was bound to.
        metrics: None if they are not enabled.

    Args:
        runner: a Runner; what else it offers (RunnerParts, `dispatch` and `collect`) is discovered here, once.
        context_length: longest sequence in tokens, prompt and output; None takes the runner's limit.
        prefix_cache: reuse aligned prefixes across requests.
        enable_metrics: collect metrics (`engine.metrics.registry`).
        overlap: plans that may be in flight while the next one is made, if the runner can; 0 (or False) waits for each.
            Results are the same. 1 hides planning; 2 also hides a read-back that takes longer than a step. None: 2
            where the runner has measured such steps, else 1.
        cache_pages: pages of the arena; None takes what all slots at full context would lease, as far as the runner's
            memory goes (`free_pages()`), and with a prefix cache all that the runner has.
        policy: scheduling choices.
        record: path of a plan recording to write.
        clock: seconds, monotonic.

    Raises:
        InvalidRequest: a setting that cannot work, with its name and the allowed range.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        context_length: int | None = None,
        prefix_cache: bool = False,
        enable_metrics: bool = True,
        overlap: int | None = None,
        cache_pages: int | None = None,
        policy: Policy | None = None,
        record: str | Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self._binding = Binding(runner, overlap, context_length)
        self.parts = self._binding.parts
        self.config = config = self.parts.config
        self.context_length = self._binding.context_length
        self._resolved: ResolvedConfig | None = None
        self._in_flight: deque[tuple[PlannedStep, Any]] = deque()
        self._clock = clock
        self._intake = Intake(config, self.context_length)
        self._health = Health()
        # Called on the stepping thread just before the runner is waited for; must not call the engine.
        self.before_wait: Callable[[], None] = lambda: None
        self._transaction = Uninterrupted(on_broken=self._quarantine)
        try:
            with Uninterrupted():
                self.arena = self._binding.bind(cache_pages, prefix_cache=prefix_cache)
                sizes = config.groups, config.geometry, self.arena.num_pages
                caches = [CacheManager(*sizes, prefix_cache=prefix_cache) for _ in range(config.replicas)]
                self.scheduler = Scheduler(config, caches, policy or Policy())
                check_context(config, caches[0], self.scheduler.replicas[0].planner, self.context_length)
                self.metrics = EngineMetrics(self.scheduler, self.parts.observations) if enable_metrics else None
                self._outcomes = Outcomes(self.scheduler, self.metrics, clock)
                if record is not None:
                    self._binding.record(Path(record), self.arena)
        except BaseException:
            self._binding.release()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        with contextlib.suppress(*([Exception] if error else ())):  # what ended the block says more than leftovers do
            self.close()

    def close(self) -> None:
        """Cancels what still runs, collects what is in flight, and gives the runner free; safe to call twice."""
        self._health.refuse_reentry()
        with self._transaction:
            try:
                if self._health.is_usable:
                    for request in [*self.scheduler.queue.waiting(), *self.scheduler.running()]:
                        self._outcomes.finish(request, FinishReason.CANCELLED)
                    while self._in_flight:
                        self._commit_oldest()
            finally:
                self._health.is_closed = True
                self._binding.release()

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        sampling_params: SamplingParams | None = None,
        priority: float = 0,
        deadline_s: float | None = None,
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
        replica: int | None = None,
    ) -> Request:
        """Queues a request.

        Args:
            token_ids: the prompt, at least one token and fewer than the context length.
            sampling_params: the request's policy; None takes the defaults.
            priority: higher runs first; one level is worth `policy.aging_s` seconds of waiting.
            deadline_s: seconds from now after which the request ends with what it has.
            cache_salt: requests with different salts never share cached prefixes.
            media: what the placeholders of the prompt stand for; prefixes with different contents are different.
            replica: where to run; None: wherever there is room.

        Raises:
            InvalidRequest: with the field, the value and the allowed range; nothing was queued.
            EngineFailed: the engine is quarantined or closed.
            KeyboardInterrupt: Ctrl-C came meanwhile; the request has been cancelled.
        """
        self._health.check()
        request = self._intake.make(
            token_ids,
            SamplingParams() if sampling_params is None else sampling_params,
            self._clock(),
            (priority, deadline_s, cache_salt, media, replica),
        )
        with self._transaction as transaction:
            self.scheduler.submit(request)
            self._intake.taken += 1
            self._outcomes.expect(request)
            if transaction.is_requested:
                self._outcomes.finish(request, FinishReason.CANCELLED)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request at any moment; its FinishedEvent comes with the next step. Ended requests are left alone."""
        self._health.refuse_reentry()
        if not request.is_finished and self._health.failure is None:
            with self._transaction:
                self._outcomes.finish(request, FinishReason.CANCELLED)

    def has_work(self) -> bool:
        """True while requests wait or run, a plan is in flight, or events have not been returned; False once closed."""
        return self._health.is_usable and bool(self._outcomes.live or self._in_flight or self._outcomes)

    def drain_events(self) -> Sequence[Event]:
        """Events not yet returned by a step, also those of a quarantined or closed engine."""
        return self._outcomes.drain()

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> Sequence[Event]:
        """Runs one transaction and returns what happened since the last step.

        Raises:
            PlanRejected, or what planning raised: nothing happened, the step may be retried.
            EngineFailed: the runner failed after accepting a plan; every live request has ended with an error.
            KeyboardInterrupt: Ctrl-C came meanwhile. The step is done and the engine goes on; its events come with the
                next step, or `drain_events`. A second Ctrl-C cuts the step short and quarantines the engine.
        """
        with self._transaction:
            self._health.check()
            self._outcomes.expire()
            planned = self._plan()
            if planned is not None:
                self._accept(planned)
                self._dispatch(planned)
            if self._in_flight and (planned is None or len(self._in_flight) > self._binding.overlap):
                self._commit_oldest()
        return self.drain_events()

    @property
    def resolved(self) -> ResolvedConfig:
        """What the engine runs with. It is settled now, or with the first step: warm the runner up before."""
        return self._resolved or self._settle()

    def _settle(self) -> ResolvedConfig:
        """Chooses what was left open, by what the runner has measured."""
        scheduler, times = self.scheduler, self.parts.step_times()
        self._resolved = found = resolve(
            self.parts, scheduler, self.context_length, self.arena, self._binding.wanted_overlap, times
        )
        self._binding.overlap = found.overlap
        scheduler.settle(found.prefill_streak_tokens, times)
        return found

    def _plan(self) -> PlannedStep | None:
        if self._resolved is None:
            self._settle()
        started = time.perf_counter()
        while True:
            with self._health:
                planned = self.scheduler.plan_next()
            if not self.scheduler.failures:
                break
            # A request's own callback raised, or it has no room alone: end that request, and plan again without it.
            if planned is not None:
                self.scheduler.rollback(planned)
            for request, error in self.scheduler.failures:
                self._outcomes.finish(request, FinishReason.ERROR, error)
            self.scheduler.failures.clear()
        if self.metrics is not None and planned is not None:
            self.metrics.on_plan(time.perf_counter() - started)
        return planned

    def _accept(self, planned: PlannedStep) -> None:
        try:
            self._binding.accept(planned.plan)
        except Exception:
            self.scheduler.rollback(planned)
            raise
        self.scheduler.accept(planned)

    def _dispatch(self, planned: PlannedStep) -> None:
        started = time.perf_counter()
        try:
            if not self._binding.overlap:
                self.before_wait()
            handle = self._binding.dispatch(planned.plan)
        except Exception as error:
            raise self._quarantine(error) from error
        self._in_flight.append((planned, handle))
        if self.metrics is not None:
            self.metrics.on_dispatch(planned, time.perf_counter() - started)

    def _commit_oldest(self) -> None:
        planned, handle = self._in_flight.popleft()
        try:
            if self._binding.overlap:
                self.before_wait()
            outputs = self._binding.collect(planned.plan, handle)
            started = time.perf_counter()
            for committed in self.scheduler.commit(planned, outputs):
                self._outcomes.publish(committed)
        except Exception as error:
            raise self._quarantine(error) from error
        if self.metrics is not None:
            self.metrics.on_commit(time.perf_counter() - started)

    def _quarantine(self, error: BaseException) -> EngineFailed:
        """Stops for good: every live request ends with the error, and no page is ever handed out again."""
        if self._health.failure is None:
            self._health.failure = error
            for request in self.scheduler.abandon():
                self._outcomes.finish(request, FinishReason.ERROR, error)
            self._in_flight.clear()
            with contextlib.suppress(Exception):  # what the runner says now is of less interest than the error
                self._binding.release()
        return EngineFailed(f"the engine is quarantined after {type(error).__name__}: {error}")
