"""Scheduler: which requests run where, and what all replicas compute next.

`plan_next` admits, chooses the phase, collects parts from the replicas and fills them in the smallest bucket that
holds each; the Engine then calls `accept` or `rollback`, and later `commit` with the runner's output. Policy:
docs/scheduling.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from resin.plan import Bucket, ForwardOutput, InvalidRequest, Phase, RunnerConfig, StepPlan, StepTimes
from resin.sched.cache import CacheManager
from resin.sched.commit import Committed, commit
from resin.sched.drafts import DraftPolicy
from resin.sched.fill import fill_tokens, prefill_costs
from resin.sched.policy import Policy
from resin.sched.queue import RequestQueue
from resin.sched.replica import Replica
from resin.sched.request import Request, RequestState
from resin.sched.routing import Router
from resin.sched.step import Demand, Part, PlannedStep

_ENDLESS = 1 << 30


class Scheduler:
    """Owns the queue and the replicas of one engine.

    Args:
        config: of the runner; its limits hold for each replica.
        caches: of the replicas, one an arena.
        policy: a user's choices.

    Attributes:
        failures: requests that cannot go on, and why.
        prefill_streak: bucket tokens of prefill steps since rows that decode had their last one.
        streak_tokens: the streak at which it is their turn.
        prefill_costs: of each size of prefill bucket; measured ones once they are known.
        drafts: whether a decode step checks drafts, and what they were worth.
    """

    def __init__(self, config: RunnerConfig, caches: Sequence[CacheManager], policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.queue = RequestQueue(policy.aging_s)
        self.failures: deque[tuple[Request, Exception]] = deque()
        self.prefill_streak = 0
        self.streak_tokens = policy.prefill_streak_tokens or _ENDLESS
        limit = max((bucket.tokens for bucket in config.of_phase(Phase.PREFILL)), default=config.max_plan_tokens)
        self.max_plan_tokens = min(limit, config.max_plan_tokens, policy.max_plan_tokens or limit)
        self.prefill_costs = prefill_costs(config, None)
        self.drafts = DraftPolicy(config)
        self.replicas = tuple(
            Replica(index, config, cache, self.queue, self.failures, self.max_plan_tokens, self.drafts)
            for index, cache in enumerate(caches)
        )
        self._router = Router(self.replicas, policy.routing, config.max_sequences)
        self._step = 0

    def settle(self, streak_tokens: int, times: StepTimes | None) -> None:
        """Takes what was left open until the runner had measured its steps."""
        self.streak_tokens = streak_tokens
        self.prefill_costs = prefill_costs(self.config, times)
        self.drafts.costs = dict(times.draft_costs) if times is not None else {}

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it names a replica that there is not.
        """
        count = len(self.replicas)
        if request.replica is not None and request.replica not in range(count):
            raise InvalidRequest("replica", request.replica, f"0 to {count - 1}, or None")
        self.queue.push(request)
        self._note_room()

    def running(self) -> Iterator[Request]:
        """Requests that hold a slot and go on."""
        for replica in self.replicas:
            yield from replica.running()

    def finish(self, request: Request, *, is_sound: bool = True) -> None:
        """Ends a waiting or running request; its pages return now, or when the last plan that holds it is collected.

        Args:
            is_sound: False if what it computed is worth nothing to others.
        """
        if request.state is RequestState.QUEUED:
            self.queue.remove(request, RequestState.FINISHED)
            self._note_room()  # it may have been the one that blocked the others
        else:
            self.replicas[request.home].finish(request, is_sound=is_sound)

    def abandon(self) -> list[Request]:
        """Ends every request; those that ran keep their slots and pages, as what these hold is unknown."""
        waiting = self.queue.waiting()
        for request in waiting:
            self.queue.remove(request, RequestState.FINISHED)
        return waiting + [request for replica in self.replicas for request in replica.abandon()]

    def _note_room(self) -> None:
        for replica in self.replicas:
            replica.note_room()

    # -- admission ----------------------------------------------------------------------------------------------

    def route(self, request: Request) -> Sequence[Replica]:
        """The replicas that take requests now and may run this one, best first."""
        return self._router.order(request, [replica for replica in self.replicas if replica.admission.is_open])

    def _admit(self) -> None:
        """Moves waiting requests into slots, best rank first, while their whole known sequence has room."""
        closed: set[int] = set()  # replicas with room for none but requests that found none
        while len(self.queue) and any(replica.admission.is_open for replica in self.replicas):
            for request in self.queue.heads():
                if self._try_admit(request, closed):
                    break
                if request.replica is None:
                    return  # nobody behind it is let past
                closed.add(request.replica)
            else:
                return

    def _try_admit(self, request: Request, closed: set[int]) -> bool:
        for replica in self.route(request):
            if replica.index not in closed and replica.admission.try_admit(request):
                self.queue.pop(request)
                self._router.note(replica)
                replica.admit(request)
                return True
        return False

    # -- steps --------------------------------------------------------------------------------------------------

    def plan_next(self) -> PlannedStep | None:
        """The next step with its pages reserved, or None if nothing can run before plans in flight are collected."""
        self._admit()
        demands = [replica.demand() for replica in self.replicas]
        for phase in self._phases(demands):
            if not any([demand[phase] for demand in demands]):
                continue
            parts: list[Part | None] = [None] * len(self.replicas)
            most_tokens = self._cut_prefill() if phase is Phase.PREFILL else 0
            try:
                for replica, demand in zip(self.replicas, demands, strict=True):
                    if demand[phase]:
                        parts[replica.index] = replica.reserve(phase, most_tokens)
                bucket = self._common_bucket(phase, parts)
                if bucket is not None:
                    return self._fill(bucket, parts)
            except BaseException:
                self._rollback(parts)
                raise
        return None

    def _phases(self, demands: Sequence[Demand]) -> tuple[Phase, Phase]:
        """Which phase comes first, and which if nobody finds room for that."""
        if self.prefill_streak >= self.streak_tokens and any(demand.decode for demand in demands):
            return Phase.DECODE, Phase.PREFILL
        return Phase.PREFILL, Phase.DECODE

    def _most_tokens(self) -> int:
        """Tokens of a prefill plan: no more than rows that decode wait for."""
        if not self._any_decodes:
            return self.max_plan_tokens
        left = self.streak_tokens - self.prefill_streak
        return min(self.max_plan_tokens, left if left > 0 else self.streak_tokens)

    def _cut_prefill(self) -> int:
        """Tokens of each replica's prefill plan at most: all that waits on the busiest, or what fills a smaller bucket.

        All run the same buckets, so the cut that is best for the busiest serves the others in its steps.
        """
        waiting = max(replica.prefill.waiting_tokens() for replica in self.replicas)
        return fill_tokens(min(self._most_tokens(), waiting), self.prefill_costs)

    @property
    def _any_decodes(self) -> bool:
        return any([replica.decode.requests for replica in self.replicas])

    def _common_bucket(self, phase: Phase, parts: list[Part | None]) -> Bucket | None:
        """The smallest bucket that holds every part, None if there is none to hold.

        Where no bucket holds them all, parts are rolled back until one does, and each replica comes first in turn.
        """
        bucket: Bucket | None = None
        if len(parts) == 1:
            return None if parts[0] is None else parts[0].bucket
        for place in range(len(parts)):
            index = (self._step + place) % len(parts)
            part = parts[index]
            if part is None:
                continue
            if bucket is None:
                bucket, needs = part.bucket, part.needs
                continue
            wider = needs.union(part.needs)
            wanted = bucket if part.bucket is bucket else wider.smallest(self.config.buckets, phase)
            if wanted is None:
                self.replicas[index].rollback(part)
                parts[index] = None
            else:
                bucket, needs = wanted, wider
        return bucket

    def _fill(self, bucket: Bucket, parts: Sequence[Part | None]) -> PlannedStep:
        plans = [replica.fill(part, bucket, self._step) for replica, part in zip(self.replicas, parts, strict=True)]
        return PlannedStep(StepPlan(bucket, tuple(plans)), tuple(parts))

    def accept(self, planned: PlannedStep) -> None:
        """The runner took the step: what it computes and emits counts from now on."""
        self._step += 1
        if planned.plan.bucket.phase is Phase.DECODE:
            self.prefill_streak = 0
        elif self._any_decodes:
            self.prefill_streak += planned.plan.bucket.tokens
        for replica, part in zip(self.replicas, planned.parts, strict=True):
            if part is not None:
                replica.accept(part)

    def rollback(self, planned: PlannedStep) -> None:
        """The step never ran: its pages return and everything is as before."""
        self._rollback(planned.parts)

    def _rollback(self, parts: Sequence[Part | None]) -> None:
        for replica, part in zip(self.replicas, parts, strict=True):
            if part is not None:
                replica.rollback(part)

    def commit(self, planned: PlannedStep, outputs: Sequence[ForwardOutput]) -> list[Committed]:
        """Applies the output of each replica's plan; that of an empty one is not looked at.

        Raises:
            BadOutput: an output does not fit its plan.
        """
        return [
            commit(replica, part, plan, output)
            for replica, part, plan, output in zip(
                self.replicas, planned.parts, planned.plan.plans, outputs, strict=True
            )
            if part is not None
        ]

    def check_integrity(self) -> None:
        """Checks page counts and slot tables against each other (tests)."""
        for replica in self.replicas:
            replica.check_integrity()
