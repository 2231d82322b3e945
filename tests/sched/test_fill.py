"""Prefill plans are cut where little of their bucket is padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resin import BatchPlan, Bucket, Engine, Phase, SamplingParams
from resin.plan import StepTimes
from resin.sched.fill import fill_tokens, prefill_costs
from tests.fakes import PagedFake, fake_config, history_group

# Milliseconds of a model that reads its weights for 4: the smallest buckets cost nearly the same.
COSTS = [(16, 4.0), (64, 4.2), (256, 7.4), (512, 12.1), (1024, 21.5), (2048, 43.0), (4096, 86.0)]


@pytest.mark.parametrize(
    ("demand", "taken"),
    [
        (1, 1),  # nothing smaller
        (17, 17),  # 4.2 at once, 8.0 in two
        (100, 100),  # 7.4 at once, 8.4 as 64 and 36
        (257, 256),  # 11.4 as 256 and 1, 12.1 at once
        (400, 400),  # 12.1 at once, 14.8 as 256 and 144
        (3000, 2048),
        (4000, 4000),  # the rest is nearly a bucket of its own
        (4096, 4096),
        (9000, 4096),  # no more than the largest bucket
    ],
)
def test_the_cheaper_way(demand: int, taken: int) -> None:
    assert fill_tokens(demand, COSTS) == taken


def test_without_buckets_a_plan_has_its_exact_size() -> None:
    assert fill_tokens(777, []) == 777


def total(demand: int, costs: list[tuple[int, float]]) -> float:
    spent = 0.0
    while demand:
        taken = fill_tokens(demand, costs)
        assert 0 < taken <= min(demand, costs[-1][0])
        spent += next(cost for tokens, cost in costs if tokens >= taken)
        demand -= taken
    return spent


@given(st.integers(1, 5000), st.lists(st.tuples(st.integers(1, 4096), st.floats(0.1, 100)), min_size=1, max_size=6))
def test_never_dearer_than_one_plan_a_bucket(demand: int, points: list[tuple[int, float]]) -> None:
    sizes, costs = sorted({tokens for tokens, _ in points}), sorted(cost for _, cost in points)
    table = list(zip(sizes, costs, strict=False))
    plain, left = 0.0, demand
    while left:  # the smallest bucket that holds what is left
        tokens, cost = next((row for row in table if row[0] >= left), table[-1])
        plain += cost
        left -= min(tokens, left)
    assert total(demand, table) <= plain * (1 + 1e-9)


SIZES = (16, 64, 256)


class SizesFake(PagedFake):
    """Prefill buckets of SIZES; keeps the plans' phases, sizes and live tokens."""

    def __init__(self) -> None:
        config = fake_config((history_group(),), max_context_tokens=512, max_plan_tokens=SIZES[-1])
        rows, pages = config.max_sequences, (1000,)
        prefill = [Bucket(Phase.PREFILL, rows, tokens, pages) for tokens in SIZES]
        super().__init__(replace(config, buckets=(*prefill, Bucket(Phase.DECODE, rows, rows, pages))))
        self.taken: list[tuple[int, int]] = []

    def accept(self, plan: BatchPlan) -> None:
        super().accept(plan)
        if plan.phase is Phase.PREFILL:
            self.taken.append((plan.bucket.tokens, plan.num_tokens))


class MeasuredFake(SizesFake):
    """Its steps take as long whatever they hold: cutting never pays."""

    def step_times(self) -> StepTimes:
        return StepTimes(tuple((tokens, 0.004) for tokens in SIZES), 0.004, 0.0)


def plans_of(runner: SizesFake, *prompts: int) -> list[tuple[int, int]]:
    with Engine(runner) as engine:
        for tokens in prompts:
            engine.submit([token % 50 for token in range(tokens)], sampling_params=SamplingParams(max_output_tokens=2))
        while engine.has_work():
            engine.step()
            engine.scheduler.check_integrity()
    return runner.taken


def test_plans_of_an_engine_are_full() -> None:
    # The last prompt is cut where the largest bucket is full, and its rest of 76 tokens where the next is.
    assert plans_of(SizesFake(), 120, 150, 62) == [(256, 256), (64, 64), (16, 12)]


def test_what_was_measured_decides() -> None:
    assert plans_of(MeasuredFake(), 120, 80) == [(256, 200)]


def test_buckets_that_were_not_measured_cost_what_their_tokens_do() -> None:
    config = SizesFake().config
    times = StepTimes(((16, 0.002), (64, 0.008)), 0.001, 0.0)
    assert prefill_costs(config, times) == [(16, 0.002), (64, 0.008), (256, pytest.approx(0.032))]
    assert [tokens for tokens, _ in prefill_costs(config, None)] == list(SIZES)
