"""What of the scheduling a user may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class Policy:
    """Tunable choices of the scheduler.

    Attributes:
        aging_s: seconds of waiting that are worth one level of priority.
        max_prefill_streak: prefill plans in a row while rows wait to decode.
        max_plan_tokens: prefill tokens a plan at most; None takes the runner's limit.
    """

    aging_s: float = 10.0
    max_prefill_streak: int = 8
    max_plan_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.aging_s < math.inf:
            raise InvalidRequest("aging_s", self.aging_s, "more than 0 seconds, finite")
        if self.max_prefill_streak < 1:
            raise InvalidRequest("max_prefill_streak", self.max_prefill_streak, "at least 1 plan")
        if self.max_plan_tokens is not None and self.max_plan_tokens < 1:
            raise InvalidRequest("max_plan_tokens", self.max_plan_tokens, "at least 1 token, or None")
