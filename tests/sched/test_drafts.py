"""Plans with drafts: whatever is guessed, requests get the tokens that they get without."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from resin import CacheGroup, Engine, Policy, Request, RowFault, SamplingParams
from resin.plan import RunnerConfig, StepTimes
from resin.sched.drafts import DraftPolicy
from resin.sched.request import FinishReason
from resin.sched.slots import SlotTable
from tests.fakes import (
    VOCAB,
    OverlapFake,
    PagedFake,
    expected_tokens,
    fake_config,
    history_group,
    state_group,
    window_group,
)

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "window": (window_group(6), history_group()),
    "compressed": (history_group(), history_group(4, "compressed")),
    "state": (history_group(), state_group(16)),
    "all": (history_group(), window_group(9), state_group(16, rows=20), window_group(5, "short")),
}


def guesser(draw: random.Random, right: float) -> Callable[[list[int]], list[int]]:
    """Drafts of which each is right that often, and of which there may be fewer."""

    def guess(truth: list[int]) -> list[int]:
        count = draw.randint(0, len(truth))
        return [token if draw.random() < right else (token + 1) % VOCAB for token in truth[:count]]

    return guess


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()


def expected(config: RunnerConfig, request: Request) -> list[int]:
    """What the request is to get, alone and token by token."""
    tokens = expected_tokens(config, request.prompt_ids.tolist(), request.max_outputs)
    stops = [i for i, token in enumerate(tokens) if token in request.params.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.mark.parametrize("overlap", [0, 1, 2, 4])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("mix", MIXES)
def test_drafts_change_no_token(mix: str, prefix_cache: bool, overlap: int) -> None:
    config = fake_config(MIXES[mix], max_sequences=4, draft_tokens=3)
    draw = random.Random(f"{mix} {prefix_cache} {overlap}")
    runner = OverlapFake(config)
    runner.guess = guesser(draw, 0.7)
    with Engine(runner, prefix_cache=prefix_cache, overlap=overlap) as engine:
        shared, requests = [draw.randrange(VOCAB) for _ in range(60)], []
        for size in (3, 17, 60, 33, 48, 1, 40):
            params = SamplingParams(
                max_output_tokens=draw.randint(1, 60), stop_token_ids=(draw.randrange(VOCAB),) if size % 2 else ()
            )
            requests.append(engine.submit(shared[:size], sampling_params=params))
            engine.step()
        run(engine)
        for request in requests:
            assert request.output_ids == expected(config, request)
        assert engine.scheduler.drafts.agreed.sum() > 30
        assert any(plan.bucket.width == 4 for plan in runner.plans)


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix"])
def test_right_drafts_take_fewer_steps(prefix_cache: bool) -> None:
    config = fake_config(MIXES["all"], draft_tokens=3)
    runner = PagedFake(config)
    with Engine(runner, prefix_cache=prefix_cache) as engine:
        request = engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=61))
        run(engine)
    assert request.output_ids == expected(config, request)
    if not prefix_cache:
        # The first token comes with the prompt, sixty in fifteen steps of four.
        assert len(runner.plans) == 16
    else:
        assert len(runner.plans) < 30, "rows slow down before the checkpoints of their States alone"


@pytest.mark.parametrize("mix", ["window", "all"])
def test_a_stop_within_a_run_ends_what_is_published(mix: str) -> None:
    config = fake_config(MIXES[mix], max_sequences=2, draft_tokens=7)
    prompts = [[7] * size for size in range(1, 20)]
    for at in range(1, 10):
        with Engine(PagedFake(config), prefix_cache=True) as engine:
            for prompt in prompts:
                truth = expected_tokens(config, prompt, 40)
                stop = truth[at]
                params = SamplingParams(max_output_tokens=40, stop_token_ids=(stop,))
                request = engine.submit(prompt, sampling_params=params)
                run(engine)
                assert request.output_ids == truth[: truth.index(stop) + 1]


def test_rows_that_something_watches_try_no_drafts() -> None:
    config = fake_config((history_group(),), max_sequences=6, draft_tokens=3)
    runner = PagedFake(config)
    watched = [
        SamplingParams(max_output_tokens=9, presence_penalty=0.5),
        SamplingParams(max_output_tokens=9, logit_bias={3: 1.0}),
        SamplingParams(max_output_tokens=9, logprobs=2),
        SamplingParams(max_output_tokens=9, allowed_tokens=lambda output: None),
        SamplingParams(max_output_tokens=9, min_output_tokens=9),
    ]
    with Engine(runner) as engine:
        requests = [engine.submit([i + 1], sampling_params=params) for i, params in enumerate(watched)]
        free = engine.submit([9], sampling_params=SamplingParams(max_output_tokens=9))
        run(engine)
    tried = {number: 0 for number in range(6)}
    for plan in runner.plans:
        for number, drafts in zip(plan.request_ids, plan.drafts.tolist(), strict=False):
            tried[number] += drafts if number >= 0 else 0
    assert [tried[request.id] for request in requests] == [0] * 5 and tried[free.id] > 0
    assert [request.output_ids for request in requests] == [expected(config, request) for request in requests]


@pytest.mark.parametrize("room", [12, 30])
def test_retracted_and_evicted_rows_with_drafts(room: int) -> None:
    """Where pages are short, a plan goes without drafts before anybody is retracted."""
    config = fake_config((history_group(), window_group(6)), max_sequences=4, max_context_tokens=40, draft_tokens=7)
    draw = random.Random(room)
    runner = OverlapFake(config)
    runner.guess = guesser(draw, 0.6)
    with Engine(runner, prefix_cache=True, cache_pages=room + 10, overlap=2) as engine:
        requests = [
            engine.submit([i] * (5 + i), sampling_params=SamplingParams(max_output_tokens=25)) for i in range(9)
        ]
        run(engine)
        assert [request.output_ids for request in requests] == [expected(config, request) for request in requests]
        assert engine.scheduler.replicas[0].retractions or room > 12


def test_cancelled_and_failing_rows() -> None:
    config = fake_config((history_group(), state_group(16)), max_sequences=4, draft_tokens=3)
    runner = OverlapFake(config)
    with Engine(runner, overlap=2) as engine:
        requests = [engine.submit([i], sampling_params=SamplingParams(max_output_tokens=50)) for i in range(4)]
        runner.faults[requests[1].id] = (14, RowFault.NO_TOKEN)
        for _ in range(5):
            engine.step()
        engine.cancel(requests[0])
        run(engine)
    assert requests[0].finish_reason is FinishReason.CANCELLED and requests[1].finish_reason is FinishReason.ERROR
    assert requests[1].output_ids == expected(config, requests[1])[: len(requests[1].output_ids)]
    assert 12 <= len(requests[1].output_ids) <= 13
    for request in requests[2:]:
        assert request.output_ids == expected(config, request)


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture(seed: int) -> None:
    fuzz(seed, steps=400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_any_mixture_for_long(seed: int) -> None:
    fuzz(seed, steps=10_000)


def fuzz(seed: int, steps: int) -> None:
    """Random requests, guesses, cancellations, page shortage: no wrong token, no lost page."""
    draw = random.Random(seed)
    done = 0
    while done < steps:
        groups = draw.choice(list(MIXES.values()))
        tokens = draw.randint(1, 7)
        config = fake_config(groups, max_sequences=draw.choice([1, 4, 7]), max_context_tokens=96, draft_tokens=tokens)
        runner = OverlapFake(config)
        runner.guess = guesser(draw, draw.choice([0.1, 0.5, 0.9, 1.0]))
        pages = draw.choice([None, 90])
        policy = Policy(max_plan_tokens=draw.choice([None, 9]))
        engine = Engine(
            runner, prefix_cache=draw.random() < 0.6, cache_pages=pages, overlap=draw.randrange(4), policy=policy
        )
        stem, requests = [draw.randrange(VOCAB) for _ in range(40)], []
        with engine:
            for _ in range(draw.randint(20, 200)):
                if draw.random() < 0.2:
                    prompt = stem[: draw.randint(1, 40)] + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 9))]
                    params = SamplingParams(
                        max_output_tokens=draw.randint(1, 50),
                        stop_token_ids=tuple(draw.randrange(VOCAB) for _ in range(draw.randint(0, 3))),
                        presence_penalty=draw.choice([0, 0, 0, 1]),
                    )
                    requests.append(engine.submit(prompt, sampling_params=params))
                if requests and draw.random() < 0.02:
                    engine.cancel(draw.choice(requests))
                engine.step()
                engine.scheduler.check_integrity()
                done += 1
            run(engine)
            for request in requests:
                assert not request.error, request.error
                truth = expected(config, request)
                if request.finish_reason is FinishReason.CANCELLED:
                    truth = truth[: len(request.output_ids)]
                assert request.output_ids == truth
            pool = engine.scheduler.replicas[0].cache.pool
            assert pool.leased == 0 and pool.free + pool.cached == pool.total


def test_drafts_are_checked_where_they_pay() -> None:
    config = fake_config((history_group(),), max_sequences=4, draft_tokens=3)
    policy, table = DraftPolicy(config), SlotTable(4, 4)
    slots = np.array([0, 1])
    for _ in range(30):
        policy.note(table, slots, np.array([[3, 3, 3], [1, 0, 3]], np.int32), width=4)
    assert table.draft_rate[0] > 0.99 and table.draft_rate[1] < 0.01 and table.ready[slots].tolist() == [3, 3]
    assert policy.tried.tolist() == [60, 30, 30] and policy.agreed.tolist() == [30, 30, 30]
    before = table.draft_rate[0]
    policy.note(table, slots[:1], np.array([[0, 0, 0]], np.int32), width=1)
    assert table.draft_rate[0] == before and table.ready[0] == 0, "nothing was checked"


@pytest.mark.parametrize(("cost", "right", "pays"), [(1.5, 1.0, True), (3.9, 1.0, False), (1.5, 0.1, False)])
def test_a_step_with_drafts_must_bring_what_it_costs(cost: float, right: float, pays: bool) -> None:
    config = fake_config((history_group(),), max_sequences=4, draft_tokens=3)
    draw, runner = random.Random(1), PagedFake(config)
    runner.guess = lambda truth: [token if draw.random() < right else (token + 1) % VOCAB for token in truth]
    runner.step_times = lambda: StepTimes((), 0.01, 0.0, ((1, cost), (4, cost)))  # type: ignore[attr-defined]
    with Engine(runner) as engine:
        assert f"drafts 3 (a step with them {cost:.2f}x of 1 {cost:.2f}x of 4)" in str(engine.resolved)
        request = engine.submit([5], sampling_params=SamplingParams(max_output_tokens=200))
        run(engine)
    assert request.output_ids == expected(config, request)
    wide = [plan.bucket.width == 4 for plan in runner.plans[20:]]
    assert np.mean(wide) > 0.9 if pays else np.mean(wide) < 0.1
