"""Resin: building blocks for LLM inference in JAX. Importing this package imports no jax."""

from resin.engine import Engine
from resin.events import Event, FinishedEvent, TokenRow, TokensEvent
from resin.health import EngineFailed
from resin.plan import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    CacheGeometry,
    CacheGroup,
    CacheGroupPlan,
    ForwardOutput,
    HistoryGroup,
    InvalidRequest,
    OverlapRunner,
    Phase,
    Plane,
    PlanRejected,
    ResinError,
    RowFault,
    RowFlag,
    Runner,
    RunnerConfig,
    SamplingParams,
    SlotLoad,
    StateGroup,
    WindowGroup,
    plan_geometry,
)
from resin.sched.keys import MediaSpan
from resin.sched.policy import Policy
from resin.sched.prefix import PrefixAudit
from resin.sched.request import FinishReason, Request, RequestFailed

__all__ = [
    "ArenaSpec",
    "BatchPlan",
    "Bucket",
    "CacheGeometry",
    "CacheGroup",
    "CacheGroupPlan",
    "Engine",
    "EngineFailed",
    "Event",
    "FinishReason",
    "FinishedEvent",
    "ForwardOutput",
    "HistoryGroup",
    "InvalidRequest",
    "MediaSpan",
    "OverlapRunner",
    "Phase",
    "PlanRejected",
    "Plane",
    "Policy",
    "PrefixAudit",
    "Request",
    "RequestFailed",
    "ResinError",
    "RowFault",
    "RowFlag",
    "Runner",
    "RunnerConfig",
    "SamplingParams",
    "SlotLoad",
    "StateGroup",
    "TokenRow",
    "TokensEvent",
    "WindowGroup",
    "plan_geometry",
]
