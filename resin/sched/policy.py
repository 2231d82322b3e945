"""What of the scheduling a user may choose."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from resin.plan import InvalidRequest


class Routing(enum.StrEnum):
    """Which replica a request goes to, unless one has more of its prompt cached or the request names one."""

    LEAST_LOADED = "least loaded"
    ROUND_ROBIN = "round robin"


@dataclass(frozen=True, slots=True)
class Policy:
    """Tunable choices of the scheduler.

    Attributes:
        aging_s: seconds of waiting that are worth one level of priority.
        decode_wait_s: prefill that rows which decode wait for between two of their steps, by the runner's measurements.
        prefill_streak_tokens: the same in tokens of the buckets; None: what the runner computes in `decode_wait_s`.
        max_plan_tokens: prefill tokens a plan at most; None takes the runner's limit.
        routing: of requests to replicas.
    """

    aging_s: float = 10.0
    decode_wait_s: float = 0.05
    prefill_streak_tokens: int | None = None
    max_plan_tokens: int | None = None
    routing: Routing = Routing.LEAST_LOADED

    def __post_init__(self) -> None:
        if not 0 < self.aging_s < math.inf:
            raise InvalidRequest("aging_s", self.aging_s, "more than 0 seconds, finite")
        if not 0 < self.decode_wait_s < math.inf:
            raise InvalidRequest("decode_wait_s", self.decode_wait_s, "more than 0 seconds, finite")
        if not isinstance(self.routing, Routing):
            raise InvalidRequest("routing", self.routing, f"one of {list(Routing)}")
        for name in ("prefill_streak_tokens", "max_plan_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(name, value, "at least 1 token, or None")
