"""The frozen types that cross the boundary between the Engine and a Runner (NumPy only)."""

from resin.plan.batch import NOBODY, BatchPlan, CacheGroupPlan, SlotLoad, build_plan, empty_plan
from resin.plan.buckets import Bucket, Phase, smallest_bucket
from resin.plan.cache import (
    CacheGeometry,
    CacheGroup,
    GroupGeometry,
    HistoryGroup,
    Plane,
    StateGroup,
    WindowGroup,
    plan_geometry,
)
from resin.plan.config import ArenaSpec, RunnerConfig, StepTimes
from resin.plan.errors import InvalidRequest, PlanRejected, ResinError
from resin.plan.flags import RowFlag
from resin.plan.layout import Column, PlanLayout, plan_layout
from resin.plan.output import ForwardOutput, RowFault
from resin.plan.runner import OverlapRunner, Runner, RunnerParts
from resin.plan.sampling import SamplingParams
from resin.plan.step import StepPlan, empty_step

__all__ = [
    "NOBODY",
    "ArenaSpec",
    "BatchPlan",
    "Bucket",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupPlan",
    "Column",
    "ForwardOutput",
    "GroupGeometry",
    "HistoryGroup",
    "InvalidRequest",
    "OverlapRunner",
    "Phase",
    "PlanLayout",
    "PlanRejected",
    "Plane",
    "ResinError",
    "RowFault",
    "RowFlag",
    "Runner",
    "RunnerConfig",
    "RunnerParts",
    "SamplingParams",
    "SlotLoad",
    "StateGroup",
    "StepPlan",
    "StepTimes",
    "WindowGroup",
    "build_plan",
    "empty_plan",
    "empty_step",
    "plan_geometry",
    "plan_layout",
    "smallest_bucket",
]
