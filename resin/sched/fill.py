"""How many tokens a prefill plan takes, so that little of its bucket is padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

from resin.plan import Phase, RunnerConfig, StepTimes

# What a plan costs beside its tokens, in tokens, of a runner that has measured nothing.
PLAN_TOKENS = 32


def prefill_costs(config: RunnerConfig, times: StepTimes | None) -> list[tuple[int, float]]:
    """(padded tokens, cost) of each size of prefill bucket, smallest first: measured seconds, else by their tokens.

    Buckets beyond the largest that was measured cost what its tokens do.
    """
    sizes = config.bucket_sizes(Phase.PREFILL)
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
    if not costs:
        return demand
    return costs[-1][0] if demand >= costs[-1][0] else _cheapest(demand, costs)[0]


def _cheapest(demand: int, costs: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Tokens of the first plan, and the cost of all plans, for no more tokens than the largest bucket has."""
    place = bisect_left(costs, demand, key=itemgetter(0))
    at_once = costs[place][1]
    if not place:
        return demand, at_once
    tokens, cost = costs[place - 1]
    plans, rest = divmod(demand, tokens)
    cut = plans * cost + (_cheapest(rest, costs)[1] if rest else 0.0)
    return (tokens, cut) if cut < at_once else (demand, at_once)
