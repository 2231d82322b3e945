"""The Engine: requests in, events out, one transaction a step.

reserve -> plan -> accept -> dispatch -> collect -> commit. Whatever fails before accept leaves the engine as it was and
may be retried; whatever fails after it quarantines the engine. Ctrl-C waits for the end of a transaction.
"""

from __future__ import annotations

import contextlib
import heapq
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from resin.binding import Binding
from resin.events import Event, FinishedEvent, TokensEvent
from resin.interrupts import Uninterrupted
from resin.metrics import EngineMetrics
from resin.plan import (
    ForwardOutput,
    InvalidRequest,
    Phase,
    ResinError,
    Runner,
    SamplingParams,
)
from resin.record import PlanRecorder
from resin.resolved import ResolvedConfig, resolve
from resin.sched.admission import check_context
from resin.sched.cache import CacheManager
from resin.sched.commit import Committed
from resin.sched.keys import MediaSpan, check_media, prompt_keys
from resin.sched.policy import Policy
from resin.sched.request import FinishReason, PromptLogprobs, Request, check_prompt, check_terms
from resin.sched.scheduler import Scheduler
from resin.sched.step import PlannedStep

MAX_OVERLAP = 4


class EngineFailed(ResinError):
    """The engine is quarantined, because a step failed after its plan was accepted, or closed. Build a new engine."""


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
        self._binding = Binding(runner)
        self.parts = self._binding.parts
        self.config = config = self.parts.config
        self.context_length = config.max_context_tokens if context_length is None else context_length
        if not 2 <= self.context_length <= config.max_context_tokens:
            raise InvalidRequest("context_length", context_length, f"2 to {config.max_context_tokens}")
        self._clock = clock
        if overlap is not None and overlap not in range(MAX_OVERLAP + 1):
            raise InvalidRequest("overlap", overlap, f"0 to {MAX_OVERLAP} plans, or None")
        self._wanted_overlap = overlap
        self._overlap = 0
        self._resolved: ResolvedConfig | None = None
        self._in_flight: deque[tuple[PlannedStep, Any]] = deque()
        self._events: list[Event] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._live = 0
        self._next_id = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        # Called on the stepping thread just before the runner is waited for; must not call the engine.
        self.before_wait: Callable[[], None] = lambda: None
        self._planning = False  # callbacks of requests run while planning, and must not come back here
        self._transaction = Uninterrupted(on_broken=self._quarantine)
        self.metrics: EngineMetrics | None = None
        self._recorder: PlanRecorder | None = None
        try:
            with Uninterrupted():
                self.arena = self._binding.bind(cache_pages, self.context_length, prefix_cache=prefix_cache)
                cache = CacheManager(config.groups, config.geometry, self.arena.num_pages, prefix_cache=prefix_cache)
                self.scheduler = Scheduler(config, [cache], policy or Policy())
                check_context(config, cache, self.scheduler.replicas[0].planner, self.context_length)
                self.metrics = EngineMetrics(self.scheduler, self.parts.observations) if enable_metrics else None
                self._recorder = PlanRecorder(Path(record), config, self.arena) if record is not None else None
        except BaseException:
            self._binding.release()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:  # else what ended the block says more than what its leftovers do
                raise

    def close(self) -> None:
        """Cancels what still runs, collects what is in flight, and gives the runner free; safe to call twice."""
        self._refuse_reentry()
        with self._transaction:
            try:
                if self._failure is None and not self._is_closed:
                    for request in [*self.scheduler.queue.waiting(), *self.scheduler.running()]:
                        self._finish(request, FinishReason.CANCELLED)
                    while self._in_flight:
                        self._commit_oldest()
            finally:
                self._is_closed = True
                recorder, self._recorder = self._recorder, None
                try:
                    if recorder is not None:
                        recorder.close()
                finally:
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
        self._check_usable()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("sampling_params", params, "a SamplingParams or None")
        prompt = check_prompt(token_ids, vocab_size=self.config.vocab_size, context_length=self.context_length)
        if self.config.vocab_size:
            params.check_vocab(self.config.vocab_size)
        elif params.allowed_tokens is not None:
            raise InvalidRequest("allowed_tokens", params.allowed_tokens, "None: the runner declares no vocab_size")
        check_terms(priority, deadline_s, cache_salt)
        spans = check_media(media, len(prompt))
        now = self._clock()
        request = Request(
            id=self._next_id,
            prompt_ids=prompt,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(64),
            max_outputs=min(params.max_output_tokens, self.context_length - len(prompt)),
            priority=float(priority),
            cache_salt=cache_salt,
            prompt_keys=prompt_keys(prompt, spans) if spans else None,
            replica=replica,
            submitted_s=now,
            deadline_at_s=None if deadline_s is None else now + deadline_s,
        )
        if params.prompt_logprobs is not None:
            places, width = len(prompt) - 1, params.prompt_logprobs
            columns = np.zeros(places, np.float32), np.zeros((places, width), np.int32), np.zeros((places, width), "f4")
            request.prompt_logprobs = PromptLogprobs(*columns)
        with self._transaction as transaction:
            self.scheduler.submit(request)
            self._next_id += 1
            self._live += 1
            if request.deadline_at_s is not None:
                self._note_deadline(request.deadline_at_s, request)
            if self.metrics is not None:
                self.metrics.on_submit(request)
            if transaction.is_requested:
                self._finish(request, FinishReason.CANCELLED)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request at any moment; its FinishedEvent comes with the next step. Ended requests are left alone."""
        self._refuse_reentry()
        if not request.is_finished and self._failure is None:
            with self._transaction:
                self._finish(request, FinishReason.CANCELLED)

    def has_work(self) -> bool:
        """True while requests wait or run, a plan is in flight, or events have not been returned; False once closed."""
        is_usable = self._failure is None and not self._is_closed
        return is_usable and bool(self._live or self._in_flight or self._events)

    def drain_events(self) -> Sequence[Event]:
        """Events not yet returned by a step, also those of a quarantined or closed engine."""
        events, self._events = self._events, []
        return events

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
            self._check_usable()
            self._expire_deadlines()
            planned = self._plan()
            if planned is not None:
                self._accept(planned)
                self._dispatch(planned)
            if self._in_flight and (planned is None or len(self._in_flight) > self._overlap):
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
            self.parts,
            scheduler.policy,
            context_length=self.context_length,
            max_plan_tokens=scheduler.max_plan_tokens,
            arena=self.arena,
            prefix_cache=scheduler.replicas[0].cache.prefixes.enabled,
            overlap=self._wanted_overlap if self._binding.can_overlap else 0,
            times=times,
        )
        self._overlap = found.overlap
        scheduler.settle(found.prefill_streak_tokens, times)
        return found

    def _plan(self) -> PlannedStep | None:
        if self._resolved is None:
            self._settle()
        started = time.perf_counter()
        while True:
            self._planning = True
            try:
                planned = self.scheduler.plan_next()
            finally:
                self._planning = False
            if not self.scheduler.failures:
                break
            # A request's own callback raised, or it has no room alone: end that request, and plan again without it.
            if planned is not None:
                self.scheduler.rollback(planned)
            for request, error in self.scheduler.failures:
                self._finish(request, FinishReason.ERROR, error)
            self.scheduler.failures.clear()
        if self.metrics is not None and planned is not None:
            self.metrics.on_plan(time.perf_counter() - started)
        return planned

    def _accept(self, planned: PlannedStep) -> None:
        try:
            self.parts.accept(planned.plan.plans[0])
        except Exception:
            self.scheduler.rollback(planned)
            raise
        self.scheduler.accept(planned)

    def _dispatch(self, planned: PlannedStep) -> None:
        started = time.perf_counter()
        try:
            (plan,) = planned.plan.plans
            if self._recorder is not None:
                self._recorder.write_plan(plan)
            runner = self._binding.runner
            if not self._overlap:
                self.before_wait()
            handle = runner.dispatch(plan) if self._overlap else runner.forward(plan)
        except Exception as error:
            raise self._quarantine(error) from error
        self._in_flight.append((planned, handle))
        if self.metrics is not None:
            self.metrics.on_dispatch(planned, time.perf_counter() - started)

    def _commit_oldest(self) -> None:
        planned, handle = self._in_flight.popleft()
        try:
            runner = self._binding.runner
            if self._overlap:
                self.before_wait()
            output: ForwardOutput = runner.collect(handle) if self._overlap else handle
            started = time.perf_counter()
            if self._recorder is not None:
                self._recorder.write_output(planned.plan.plans[0], output)
            for committed in self.scheduler.commit(planned, [output]):
                self._publish_events(committed, output)
        except Exception as error:
            raise self._quarantine(error) from error
        if self.metrics is not None:
            self.metrics.on_commit(time.perf_counter() - started)

    def _publish_events(self, committed: Committed, output: ForwardOutput) -> None:
        now, plan = self._clock(), committed.plan
        count = len(committed.requests)
        if count:
            requests, tokens, indptr = tuple(committed.requests), committed.token_ids, np.arange(count + 1)
            picked: list[np.ndarray | None] = []
            if plan.wants_logprobs:
                columns = (output.logprobs, output.top_ids, output.top_logprobs)
                picked = [None if column is None else np.asarray(column)[committed.rows] for column in columns]
            self._events.append(TokensEvent(requests, tokens, indptr, *picked))
        if plan.phase is Phase.PREFILL:
            for request in committed.requests:
                if request.first_token_s is None:
                    request.first_token_s = now
        if self.metrics is not None:
            self.metrics.on_tokens(committed, now)
        committed.stamp(now)
        for request, reason in committed.finished:
            self._finish(request, reason)
        for request, error in committed.failed:
            self._finish(request, FinishReason.ERROR, error)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        if request.finish_reason is not None:
            return
        if not request.is_finished:
            self.scheduler.finish(request, is_sound=reason is not FinishReason.ERROR)
        request.finish_reason, request.error = reason, error
        request.finished_s = self._clock()
        self._live -= 1
        self._events.append(FinishedEvent(request, reason))
        if self.metrics is not None:
            self.metrics.on_finish(request)

    def _note_deadline(self, at_s: float, request: Request) -> None:
        if len(self._deadlines) > 2 * self._live + 64:  # mostly those of requests that ended long before
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_finished]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (at_s, request.id, request))

    def _expire_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_finished:
                self._finish(request, FinishReason.DEADLINE)

    def _quarantine(self, error: BaseException) -> EngineFailed:
        """Stops for good: every live request ends with the error, and no page is ever handed out again."""
        if self._failure is None:
            self._failure = error
            for request in self.scheduler.abandon():
                self._finish(request, FinishReason.ERROR, error)
            self._in_flight.clear()
            with contextlib.suppress(Exception):  # what the runner says now is of less interest than the error
                self._binding.release()
        return EngineFailed(f"the engine is quarantined after {type(error).__name__}: {error}")

    def _refuse_reentry(self) -> None:
        if self._planning:
            raise RuntimeError("an allowed_tokens callback called the engine that runs it")

    def _check_usable(self) -> None:
        self._refuse_reentry()
        if self._failure is not None:
            raise EngineFailed(f"the engine is quarantined after {self._failure!r}") from self._failure
        if self._is_closed:
            raise EngineFailed("the engine is closed")
