"""How many tokens a prefill plan takes, so that little of its bucket is padding."""

from __future__ import annotations

from collections.abc import Sequence

from resin.plan import Phase, RunnerConfig, StepTimes

# What a plan costs beside its tokens, in tokens, of a runner that has measured nothing.
PLAN_TOKENS = 32


def prefill_costs(config: RunnerConfig, times: StepTimes | None) -> list[tuple[int, float]]:
    """(padded tokens, cost) of each size of prefill bucket, smallest first: measured seconds, else by their tokens.

    Buckets beyond the largest that was measured cost what its tokens do.
    """
    sizes = sorted({bucket.tokens for bucket in config.buckets if bucket.phase is Phase.PREFILL})
    if times is None or not times.prefill_s:
        return [(tokens, float(tokens + PLAN_TOKENS)) for tokens in sizes]
    measured = dict(times.prefill_s)
    largest, seconds = times.prefill_s[-1]
    return [(tokens, measured.get(tokens, seconds * tokens / largest)) for tokens in sizes]


def fill_tokens(demand: int, costs: Sequence[tuple[int, float]]) -> int:
    """Tokens of the next plan: all of the demand in one bucket, or as many as fill a smaller one while the rest waits.

    Args:
        demand: tokens that wait, at least 1.
        costs: (padded tokens, cost) of each bucket, smallest first; costs of any one unit.

    Returns:
        The demand, or the size of the largest bucket that is full, whichever way to compute all of it costs less.
    """
    if not costs or demand >= costs[-1][0]:
        return min(demand, costs[-1][0]) if costs else demand
    whole = next(index for index, (tokens, _) in enumerate(costs) if tokens >= demand)
    if not whole:
        return demand
    tokens, cost = costs[whole - 1]
    return tokens if cost + _least_cost(demand - tokens, costs[:whole]) < costs[whole][1] else demand


def _least_cost(demand: int, costs: Sequence[tuple[int, float]]) -> float:
    """Of plans for so many tokens, no more than the largest bucket: each is cut as `fill_tokens` does."""
    spent = 0.0
    while demand > 0:
        taken = fill_tokens(demand, costs)
        spent += next(cost for tokens, cost in costs if tokens >= taken)
        demand -= taken
    return spent
