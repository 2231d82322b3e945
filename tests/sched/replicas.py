"""Several replicas without an engine: a scheduler over as many fake runners, each with an arena of its own."""

from __future__ import annotations

from collections import deque

import numpy as np

from resin import ArenaSpec, ForwardOutput, Policy, Request, RunnerConfig, SamplingParams
from resin.sched.cache import CacheManager
from resin.sched.request import FinishReason
from resin.sched.scheduler import Scheduler
from resin.sched.step import PlannedStep
from tests.fakes import PagedFake


class Cluster:
    """What an engine does with a scheduler, for any number of replicas.

    Attributes:
        planned: every step that was accepted.
    """

    def __init__(
        self,
        config: RunnerConfig,
        count: int,
        *,
        pages: int,
        prefix_cache: bool = True,
        overlap: int = 0,
        policy: Policy | None = None,
    ) -> None:
        caches = [CacheManager(config.groups, config.geometry, pages, prefix_cache=prefix_cache) for _ in range(count)]
        self.config = config
        self.scheduler = Scheduler(config, caches, policy or Policy())
        self.runners = [PagedFake(config) for _ in range(count)]
        for runner in self.runners:
            runner.bind(ArenaSpec(pages, config.geometry.page_bytes, config.arena_dtype))
        self.overlap = overlap
        self.planned: list[PlannedStep] = []
        self.in_flight: deque[tuple[PlannedStep, list[ForwardOutput]]] = deque()
        self.requests: list[Request] = []

    def submit(
        self, prompt: list[int], outputs: int, *, priority: float = 0, replica: int | None = None, salt: str = ""
    ) -> Request:
        request = Request(
            id=len(self.requests),
            prompt_ids=np.asarray(prompt, np.int32),
            params=SamplingParams(max_output_tokens=outputs, temperature=0),
            seed=0,
            max_outputs=outputs,
            priority=priority,
            cache_salt=salt,
            replica=replica,
            submitted_s=float(len(self.requests)),
        )
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def plan(self) -> PlannedStep | None:
        planned = self.scheduler.plan_next()
        while self.scheduler.failures:
            if planned is not None:
                self.scheduler.rollback(planned)
            for request, error in self.scheduler.failures:
                request.error = error
                self.finish(request, FinishReason.ERROR)
            self.scheduler.failures.clear()
            planned = self.scheduler.plan_next()
        return planned

    def step(self) -> None:
        planned = self.plan()
        if planned is not None:
            self.scheduler.accept(planned)
            self.planned.append(planned)
            plans = zip(self.runners, planned.plan.plans, strict=True)
            self.in_flight.append((planned, [runner.forward(plan) for runner, plan in plans]))
        if self.in_flight and (planned is None or len(self.in_flight) > self.overlap):
            self.commit_oldest()

    def commit_oldest(self) -> None:
        for committed in self.scheduler.commit(*self.in_flight.popleft()):
            committed.stamp(0.0)
            for request, reason in committed.finished:
                self.finish(request, reason)

    def finish(self, request: Request, reason: FinishReason) -> None:
        if not request.is_finished:
            self.scheduler.finish(request)
            request.finish_reason = reason

    @property
    def has_work(self) -> bool:
        return bool(self.in_flight) or not all(request.is_finished for request in self.requests)

    def run(self) -> None:
        steps = 0
        while self.has_work:
            self.step()
            self.check()
            steps += 1
            assert steps < 100 + 200 * len(self.requests), "starvation"
        assert not any(replica.cache.pool.leased for replica in self.scheduler.replicas)

    def check(self) -> None:
        """Every page and slot is where it should be, and no request in two places."""
        self.scheduler.check_integrity()
        for request in self.scheduler.running():
            assert request.replica in (None, request.home)
        for request in self.scheduler.queue.waiting():
            assert request.lease is None and request.slot == -1
