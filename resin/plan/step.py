"""StepPlan: what all replicas compute in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resin.plan.batch import BatchPlan, empty_plan
from resin.plan.buckets import Bucket
from resin.plan.config import RunnerConfig


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One plan for each replica, all of the same compiled shape, so that every replica runs the same program.

    Attributes:
        bucket: of every plan.
        plans: in the order of the replicas; a replica with nothing to do has an empty plan, all padding.
    """

    bucket: Bucket
    plans: tuple[BatchPlan, ...]

    def __post_init__(self) -> None:
        assert self.plans and all([plan.bucket == self.bucket for plan in self.plans])

    @property
    def buffer(self) -> np.ndarray:
        """int32 [replicas * layout.words], the plans' buffers one below the other."""
        buffers = [plan.buffer for plan in self.plans]
        return np.concatenate(buffers) if len(buffers) > 1 else buffers[0]

    @classmethod
    def of(cls, plan: BatchPlan | StepPlan) -> StepPlan:
        """A step of one replica's plan; a step is itself."""
        return plan if isinstance(plan, StepPlan) else cls(plan.bucket, (plan,))


def empty_step(config: RunnerConfig, bucket: Bucket) -> StepPlan:
    """A step in which no replica has a row."""
    return StepPlan(bucket, tuple(empty_plan(config, bucket) for _ in range(config.replicas)))
