"""What an engine settles on: overlap and the prefill between decode steps, by what its runner has measured."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from resin import Engine, Phase, Policy, Request, RunnerConfig, SamplingParams
from resin.plan import StepTimes
from resin.resolved import pick_overlap, pick_streak
from tests.fakes import OverlapFake, PagedFake, fake_config, history_group

CONFIG = fake_config((history_group(),), max_plan_tokens=32)  # prefill buckets of 8 and 32 tokens


class Measured(OverlapFake):
    """A runner that says what its steps take."""

    def __init__(self, config: RunnerConfig, times: StepTimes | None) -> None:
        super().__init__(config)
        self.times = times

    def step_times(self) -> StepTimes | None:
        return self.times

    def facts(self) -> dict[str, str]:
        return {"dtype": "float32"}


@pytest.mark.parametrize(
    ("step_s", "read_back_s", "overlap"), [(0.01, 1e-3, 1), (1e-3, 1.2e-3, 2), (1e-3, 0.0, 1), (2e-4, 1e-3, 2)]
)
def test_short_steps_overlap_twice(step_s: float, read_back_s: float, overlap: int) -> None:
    times = StepTimes((), step_s, read_back_s)
    assert pick_overlap(times) == overlap and pick_overlap(None) == 1
    with Engine(Measured(CONFIG, times)) as engine:
        assert engine.resolved.overlap == overlap
    for asked in (0, 1, 3):
        with Engine(Measured(CONFIG, times), overlap=asked) as engine:
            assert engine.resolved.overlap == asked
    with Engine(PagedFake(CONFIG), overlap=2) as engine:
        assert engine.resolved.overlap == 0, "it cannot"


@pytest.mark.parametrize(
    ("prefill_s", "streak"),
    [
        (((8, 0.06), (32, 0.2)), 8),  # never nothing
        (((8, 0.01), (32, 0.06)), 8),
        (((8, 0.01), (32, 0.05)), 32),
        (((8, 0.001), (32, 0.02)), 64),
        (((8, 0.02),), 8),  # the other took too long to be measured
        (((8, 0.0), (32, 0.0)), 32 * 50_000),
    ],
)
def test_prefill_between_decode_steps_takes_the_time_that_is_allowed(
    prefill_s: tuple[tuple[int, float], ...], streak: int
) -> None:
    times = StepTimes(prefill_s, 0.01, 0.0)
    assert pick_streak(CONFIG, times, 0.05, 32) == streak
    with Engine(Measured(CONFIG, times)) as engine:
        assert engine.resolved.prefill_streak_tokens == streak
    with Engine(Measured(CONFIG, times), policy=Policy(prefill_streak_tokens=5)) as engine:
        assert engine.resolved.prefill_streak_tokens == 5


def waits_of(engine: Engine, runner: OverlapFake, decoding: Request) -> list[int]:
    """Bucket tokens of prefill between two decode plans while `decoding` had tokens to come."""
    waits, tokens = [], 0
    first = len(runner.plans)
    while not decoding.is_finished:
        engine.step()
    for plan in runner.plans[first:]:
        if plan.phase is Phase.PREFILL:
            tokens += plan.bucket.tokens
        else:
            waits.append(tokens)
            tokens = 0
    return waits


@pytest.mark.parametrize("streak", [8, 20, 32, 100])
@pytest.mark.parametrize("lengths", [(200,), (9,) * 20, (3, 60, 1, 1, 150)])
def test_a_decoding_row_waits_for_no_more_prefill_than_that(streak: int, lengths: tuple[int, ...]) -> None:
    """Prompts that come meanwhile, long or many, are cut to what is left of it; what they are padded to counts."""
    runner = Measured(CONFIG, None)
    with Engine(runner, policy=Policy(prefill_streak_tokens=streak), overlap=0) as engine:
        decoding = engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=60, temperature=0))
        while not decoding.output_ids:
            engine.step()
        for length in lengths:
            engine.submit([5] * length, sampling_params=SamplingParams(max_output_tokens=2, temperature=0))
        waits = waits_of(engine, runner, decoding)
    padding = max(bucket.tokens for bucket in CONFIG.buckets if bucket.phase is Phase.PREFILL)
    assert 0 < max(waits) < streak + padding
    if streak in (8, 32):  # a bucket's size
        assert max(waits) <= streak


def test_prompts_alone_are_not_cut() -> None:
    runner = Measured(CONFIG, None)
    with Engine(runner, policy=Policy(prefill_streak_tokens=8)) as engine:
        engine.submit([5] * 96, sampling_params=SamplingParams(max_output_tokens=1))
        while engine.has_work():
            engine.step()
    assert [plan.num_tokens for plan in runner.plans] == [32, 32, 32]


def test_it_is_settled_once_and_tells_what_it_is() -> None:
    runner = Measured(CONFIG, None)
    with Engine(runner, prefix_cache=True) as engine:
        found = engine.resolved
        runner.times = StepTimes(((8, 0.001),), 1e-4, 1e-3)
        assert engine.resolved is found and found.decode_step_s is None
        assert found.prefill_buckets == (8, 32) and found.num_pages == engine.arena.num_pages and found.prefix_cache
        with pytest.raises(FrozenInstanceError):
            found.overlap = 2  # type: ignore[misc]
        assert json.loads(json.dumps(found.as_record()))["runner"] == {"dtype": "float32"}
        for words in ("dtype float32", "4 sequences of 256 tokens", "prefill buckets 8,32", "overlap 1 (not measured)"):
            assert words in str(found)
