"""StepPlan: what all replicas compute in one step."""

from __future__ import annotations

from dataclasses import dataclass

from resin.plan.batch import BatchPlan
from resin.plan.buckets import Bucket


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
        assert self.plans and all(plan.bucket is self.bucket for plan in self.plans)
