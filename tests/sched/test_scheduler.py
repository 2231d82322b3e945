"""Scheduling decisions: buckets that barely hold, memory pressure, admission, and planning that fails half way."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from resin import (
    BatchPlan,
    Bucket,
    CacheGroup,
    Engine,
    FinishReason,
    ForwardOutput,
    InvalidRequest,
    Phase,
    PlanRejected,
    Policy,
    Request,
    RunnerConfig,
    SamplingParams,
    StateGroup,
)
from resin.sched.request import RequestState
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

RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_output_tokens=count, temperature=0)


def prompt(tokens: int, first: int = 0) -> list[int]:
    return [(first + 7 * i) % VOCAB for i in range(tokens)]


def run(engine: Engine, max_steps: int = 3000) -> None:
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
        max_steps -= 1
        assert max_steps, "no end"


def with_buckets(config: RunnerConfig, prefill_pages: list[int], decode_pages: list[int]) -> RunnerConfig:
    rows = config.max_sequences
    return replace(
        config,
        buckets=(
            Bucket(Phase.PREFILL, rows, config.max_plan_tokens, tuple(prefill_pages)),
            Bucket(Phase.DECODE, rows, rows, tuple(decode_pages)),
        ),
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"aging_s": 0}, "aging_s"),
        ({"aging_s": -1.0}, "aging_s"),
        ({"aging_s": math.nan}, "aging_s"),
        ({"aging_s": math.inf}, "aging_s"),
        ({"prefill_streak_tokens": 0}, "prefill_streak_tokens"),
        ({"decode_wait_s": 0}, "decode_wait_s"),
        ({"max_plan_tokens": 0}, "max_plan_tokens"),
        ({"max_plan_tokens": -5}, "max_plan_tokens"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Policy(**settings)
    assert error.value.field == field


# -- buckets ------------------------------------------------------------------------------------------------------


MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "window 1": (window_group(1),),
    "window 9": (window_group(9),),
    "history+window 6": (history_group(), window_group(6)),
    "two windows+state": (window_group(5, "near"), window_group(17, "far", rows=4), state_group(16)),
}


@RUNNERS
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_tightest_buckets_that_are_accepted_carry_every_request(
    mix: str, prefix_cache: bool, runner_class: type[PagedFake]
) -> None:
    """Large chunks leave wide Window rows behind; neither the next chunk nor decoding may trip over them."""
    config = fake_config(MIXES[mix], max_context_tokens=128, max_sequences=2, max_plan_tokens=32)
    cache = Engine(PagedFake(config)).scheduler.replicas[0].cache
    least = cache.row_pages_needed(config.max_context_tokens, 1)
    pages = iter(least)
    least = [0 if isinstance(group, StateGroup) else next(pages) for group in config.groups]
    wide = [10 * count for count in least]
    for prefill, decode in ((least, wide), (wide, least), (least, least)):
        tight = with_buckets(config, prefill, decode)
        with Engine(runner_class(tight), prefix_cache=prefix_cache) as engine:
            sent = [engine.submit(prompt(tokens), sampling_params=greedy(9)) for tokens in (60, 33, 5, 60)]
            run(engine)
            for request in sent:
                assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 9)


def test_a_bucket_too_small_for_one_sequence_is_refused() -> None:
    config = fake_config((history_group(),), max_context_tokens=128, max_sequences=2)
    for prefill, decode in (([31], [64]), ([64], [31])):
        with pytest.raises(InvalidRequest, match="32"):
            Engine(PagedFake(with_buckets(config, prefill, decode)))
    Engine(PagedFake(with_buckets(config, [32], [32])))


@RUNNERS
def test_window_rows_hold_what_the_plan_can_see_and_no_more(runner_class: type[PagedFake]) -> None:
    window = 10
    config = fake_config((window_group(window),), max_context_tokens=256)
    span = config.geometry.groups[0].span_tokens
    runner = runner_class(config)

    def check(plan: BatchPlan) -> None:
        group = plan.groups[0]
        assert group.page_indptr is not None and group.first_position is not None
        for row in range(plan.num_sequences):
            start, stop = plan.positions[plan.query_indptr[row]], plan.seq_lens[row]
            first = group.first_position[row]
            assert first % span == 0 and first <= max(start - window + 1, 0)
            pages = group.page_indptr[row + 1] - group.page_indptr[row]
            assert pages == -(-stop // span) - first // span, "chronological, up to the last token"
            assert pages <= (window + (stop - start) - 2) // span + 3

    runner.check = check
    with Engine(runner) as engine:
        for i in range(6):
            engine.submit(prompt(90 + i, i), sampling_params=greedy(30))
        run(engine)
    assert len(runner.plans) > 30


@RUNNERS
def test_rows_that_no_bucket_holds_together_take_turns(runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(),), max_context_tokens=64, max_sequences=4, max_plan_tokens=64)
    runner = runner_class(with_buckets(config, [64], [20]))  # 20 pages hold two rows of 40 tokens, not four
    with Engine(runner) as engine:
        sent = [engine.submit(prompt(33, i), sampling_params=greedy(20)) for i in range(4)]
        last: dict[int, int] = {}
        for step in range(500):
            if not engine.has_work():
                break
            engine.step()
            for request in engine.scheduler.replicas[0].decode.requests:
                if request.id in runner.plans[-1].request_ids:
                    last[request.id] = step
                assert step - last.get(request.id, step) <= 6, "a row waits longer than the others need"
        for request in sent:
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 20)
    decodes = [plan.num_sequences for plan in runner.plans if plan.phase is Phase.DECODE]
    assert max(decodes) == 2


def test_plans_take_the_smallest_bucket() -> None:
    config = fake_config((history_group(),), max_sequences=4)
    runner = PagedFake(config)
    with Engine(runner) as engine:
        engine.submit(prompt(8), sampling_params=greedy(3))
        run(engine)
        for i in range(3):
            engine.submit(prompt(8, i), sampling_params=greedy(2))
        run(engine)
    used = [(plan.phase, plan.bucket.sequences, plan.bucket.tokens) for plan in runner.plans]
    assert used == [
        (Phase.PREFILL, 4, 8),
        (Phase.DECODE, 1, 1),
        (Phase.DECODE, 1, 1),
        (Phase.PREFILL, 4, 32),
        (Phase.DECODE, 4, 4),
    ]


# -- memory pressure and admission ----------------------------------------------------------------------------------


@RUNNERS
def test_a_starving_prefill_gets_the_pages_of_younger_decoding_rows(runner_class: type[PagedFake]) -> None:
    """The decoding row grew while the long prompt, of better rank, was still coming in; it goes when room runs out."""
    config = fake_config((history_group(),), max_plan_tokens=8, max_sequences=2)
    policy = Policy(prefill_streak_tokens=8)
    with Engine(runner_class(config), context_length=220, cache_pages=1 + 56, policy=policy) as engine:
        young = engine.submit(prompt(4), sampling_params=greedy(200), priority=-5)
        for _ in range(3):
            engine.step()
        old = engine.submit(prompt(200), sampling_params=greedy(3))
        run(engine)
        assert young.retractions > 0 and old.retractions == 0
        for request, count in ((young, 200), (old, 3)):
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), count)


@RUNNERS
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
@pytest.mark.parametrize("mix", [(history_group(),), (history_group(), window_group(6), state_group(8, rows=20))])
def test_a_pool_of_exactly_one_sequence_runs_everything(
    mix: tuple[CacheGroup, ...], prefix_cache: bool, runner_class: type[PagedFake]
) -> None:
    config = fake_config(mix, max_context_tokens=64, max_sequences=3)
    pages = Engine(PagedFake(config), prefix_cache=prefix_cache).scheduler.replicas[0].cache.pages_needed(64, 1)
    with pytest.raises(InvalidRequest, match="context_length"):
        Engine(PagedFake(config), prefix_cache=prefix_cache, cache_pages=pages)
    with Engine(runner_class(config), prefix_cache=prefix_cache, cache_pages=pages + 1) as engine:
        sent = [engine.submit(prompt(tokens, tokens), sampling_params=greedy(100)) for tokens in (63, 1, 40, 1, 62)]
        run(engine)
        for request in sent:
            room = 64 - len(request.prompt_ids)
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), room)
        assert engine.scheduler.replicas[0].cache.pool.leased == 0


def test_a_request_that_blocks_the_queue_lets_others_in_when_it_leaves() -> None:
    config = fake_config((history_group(),), max_sequences=3)
    now = [0.0]
    with Engine(PagedFake(config), context_length=64, cache_pages=1 + 16, clock=lambda: now[0]) as engine:
        engine.submit(prompt(20), sampling_params=greedy(40))
        engine.step()
        blocked = [engine.submit(prompt(60), sampling_params=greedy(2), deadline_s=limit) for limit in (None, 5.0)]
        small = engine.submit(prompt(1), sampling_params=greedy(2))
        engine.step()
        assert {request.state for request in (*blocked, small)} == {RequestState.QUEUED}
        engine.cancel(blocked[0])
        now[0] = 6.0
        engine.step()
        assert small.state is not RequestState.QUEUED


@RUNNERS
def test_chunks_go_by_rank_whoever_came_in_first(runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(),), max_plan_tokens=8, max_sequences=3)
    runner = runner_class(config)
    with Engine(runner) as engine:
        low = engine.submit(prompt(60), sampling_params=greedy(2))
        for _ in range(2):
            engine.step()
        high = engine.submit(prompt(20, 5), sampling_params=greedy(2), priority=5)
        middle = engine.submit(prompt(20, 9), sampling_params=greedy(2), priority=1)
        run(engine)
        first = [request.first_token_s or 0.0 for request in (high, middle, low)]
        assert first == sorted(first) and len(set(first)) == 3


@RUNNERS
def test_a_runner_without_cache_groups_runs_all_its_slots(runner_class: type[PagedFake]) -> None:
    runner = runner_class(fake_config((), max_sequences=4))
    with Engine(runner) as engine:
        for i in range(9):
            engine.submit([i], sampling_params=greedy(6))
        while engine.has_work():
            engine.step()
    assert max(plan.num_sequences for plan in runner.plans if plan.phase is Phase.DECODE) == 4


def test_nobody_overtakes_the_request_that_waits_for_room() -> None:
    config = fake_config((history_group(),), max_sequences=3)
    with Engine(PagedFake(config), context_length=64, cache_pages=1 + 16) as engine:
        engine.submit(prompt(20), sampling_params=greedy(10))
        engine.step()
        large = engine.submit(prompt(60), sampling_params=greedy(2))
        small = [engine.submit(prompt(1), sampling_params=greedy(2)) for _ in range(5)]
        while large.state is RequestState.QUEUED:
            engine.step()
            assert large.state is not RequestState.QUEUED or all(r.state is RequestState.QUEUED for r in small)
        run(engine)


def test_admission_after_waiting_is_what_the_audit_tells() -> None:
    """A first look at the cache that led to nothing must not count."""
    config = fake_config((history_group(),), max_sequences=2)
    with Engine(PagedFake(config), context_length=64, cache_pages=1 + 16, prefix_cache=True) as engine:
        engine.submit(prompt(40), sampling_params=greedy(12))
        waiting = engine.submit(prompt(40) + [3] * 20, sampling_params=greedy(2))
        engine.step()
        assert waiting.state is RequestState.QUEUED and waiting.prefix_audit is None
        run(engine)
        assert waiting.prefix_audit is not None and waiting.prefix_hit_tokens == 40
        assert sum(waiting.prefix_audit.losses.values()) == waiting.prefix_audit.ceiling_tokens - 40


@RUNNERS
def test_a_retracted_request_comes_back_before_newer_ones_and_keeps_its_audit(runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(),), max_sequences=2)
    with Engine(runner_class(config), context_length=64, cache_pages=1 + 18, prefix_cache=True) as engine:
        first, second, third = (engine.submit(prompt(20, i), sampling_params=greedy(40)) for i in range(3))
        while not second.retractions:
            engine.step()
        audit = second.prefix_audit
        run(engine)
        assert second.prefix_audit is audit and first.retractions == 0
        assert second.finished_s is not None and third.first_token_s is not None
        assert second.first_token_s is not None and second.first_token_s < third.first_token_s


# -- boundaries -----------------------------------------------------------------------------------------------------

BOUNDARY_MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "history+state": (history_group(), state_group(16)),
    "all": (history_group(), window_group(8), state_group(16)),
    "compressed": (history_group(4, rows=8), history_group(1, "index", rows=1)),
}


@RUNNERS
@pytest.mark.parametrize("mix", sorted(BOUNDARY_MIXES))
def test_prompts_that_end_on_and_beside_every_boundary(mix: str, runner_class: type[PagedFake]) -> None:
    """Chunks of 16 tokens, pages of 4, checkpoints of 16: one less, exactly, one more; cold and from the cache."""
    config = fake_config(BOUNDARY_MIXES[mix], max_plan_tokens=16, max_context_tokens=96, max_sequences=3)
    sizes = [1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64]
    with Engine(runner_class(config), prefix_cache=True) as engine:
        for _ in range(2):
            for tokens in sizes:
                request = engine.submit(prompt(tokens), sampling_params=greedy(6))
                run(engine)
                assert request.take_result() == expected_tokens(config, prompt(tokens), 6)
                assert request.prefix_hit_tokens < tokens, "the last token is always computed"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_shortest_context_and_a_single_slot(overlap: bool) -> None:
    config = fake_config((history_group(), window_group(3)), max_context_tokens=2, max_sequences=1, max_plan_tokens=8)
    with Engine(OverlapFake(config), overlap=overlap, prefix_cache=True) as engine:
        with pytest.raises(InvalidRequest, match="token_ids"):
            engine.submit([1, 2])
        sent = [engine.submit([token], sampling_params=greedy(50)) for token in (4, 5, 4)]
        run(engine)
        for request in sent:
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 1)
            assert request.finish_reason is FinishReason.LENGTH


# -- faults ---------------------------------------------------------------------------------------------------------


class Nth:
    """Wraps a function: call number `nth` raises."""

    def __init__(self, function: Any, nth: int) -> None:
        self.function, self.left = function, nth

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("out of host memory")
        return self.function(*args, **kwargs)


FAULTS = [
    ("cache", "try_extend", 1),
    ("cache", "try_extend", 2),
    ("cache", "try_extend_rows", 1),
    ("cache.prefixes", "lease", 2),
    ("planner", "plan_prefill", 1),
    ("planner", "plan_decode", 1),
]


@RUNNERS
@pytest.mark.parametrize(("owner", "name", "nth"), FAULTS)
def test_planning_that_fails_anywhere_leaks_nothing_and_can_be_repeated(
    owner: str, name: str, nth: int, runner_class: type[PagedFake], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config((history_group(), window_group(6), state_group(8, rows=20)), max_sequences=4)
    with Engine(runner_class(config), prefix_cache=True) as engine:
        early = [engine.submit(prompt(9, i), sampling_params=greedy(12)) for i in range(2)]
        for _ in range(4):
            engine.step()
        late = [engine.submit(prompt(9, 10 + i), sampling_params=greedy(12)) for i in range(2)]
        target = attrgetter(owner)(engine.scheduler.replicas[0])
        monkeypatch.setattr(target, name, Nth(getattr(target, name), nth))
        failed = 0
        for _ in range(12):
            try:
                engine.step()
            except MemoryError:
                failed += 1
            engine.scheduler.check_integrity()
        assert failed == 1
        monkeypatch.undo()
        run(engine)
        for request in (*early, *late):
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 12)
        assert engine.scheduler.replicas[0].cache.pool.leased == 0


@RUNNERS
def test_a_runner_that_refuses_every_other_plan_changes_nothing(runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(), window_group(6), state_group(8, rows=20)), max_sequences=4)
    runner = runner_class(config)
    with Engine(runner, prefix_cache=True, context_length=96, cache_pages=90) as engine:
        sent: list[Request] = [engine.submit(prompt(30, i % 2), sampling_params=greedy(40)) for i in range(6)]
        refused = 0
        while engine.has_work():
            runner.fail["accept"] = PlanRejected("busy")
            try:
                engine.step()
            except PlanRejected:
                refused += 1
            runner.fail.clear()
            engine.scheduler.check_integrity()
            if engine.has_work():
                engine.step()
                engine.scheduler.check_integrity()
        assert refused > 10
        for request in sent:
            assert request.take_result() == expected_tokens(config, request.prompt_ids.tolist(), 40)
    steps = [plan.step for plan in runner.plans]
    assert steps == list(range(len(steps))), "a refused plan leaves no gap"


def test_a_runner_without_cache_groups_lets_everybody_in() -> None:
    # There are no pages to wait for; requests must not run one after another.
    class Minimal:
        def forward(self, plan: BatchPlan) -> ForwardOutput:
            rows = plan.num_sequences
            return ForwardOutput(np.zeros(rows, np.int32), np.arange(rows + 1))

    engine = Engine(Minimal())
    for _ in range(3):
        engine.submit([1], sampling_params=SamplingParams(max_output_tokens=50))
        engine.step()
    assert engine.scheduler.replicas[0].num_running == 3


@RUNNERS
def test_a_blocked_prefill_of_better_rank_takes_pages_from_a_row_that_decodes(runner_class: type[PagedFake]) -> None:
    config = fake_config((history_group(),), max_sequences=2)
    runner = runner_class(config)
    policy = Policy(prefill_streak_tokens=4, max_plan_tokens=4)
    with Engine(runner, cache_pages=1 + 22, context_length=84, policy=policy) as engine:
        young = engine.submit(prompt(8), sampling_params=greedy(70))
        for _ in range(4):
            engine.step()
        old = engine.submit(prompt(64, 1), sampling_params=greedy(5), priority=5)
        gap = longest = 0
        while not old.is_finished:
            plans = len(runner.plans)
            engine.step()
            engine.scheduler.check_integrity()
            for plan in runner.plans[plans:]:
                gap = 0 if old.id in plan.request_ids else gap + 1
                longest = max(longest, gap)
        assert young.retractions == 1 and old.retractions == 0 and longest <= 2
        run(engine)
        for request in (young, old):
            count = len(request.output_ids)
            assert request.output_ids == expected_tokens(config, request.prompt_ids.tolist(), count)


@RUNNERS
def test_penalised_requests_wait_for_rows_of_counts(runner_class: type[PagedFake]) -> None:
    """They run, two at a time, in the order in which they came, and take no row from one another."""
    config = replace(fake_config((history_group(),), max_sequences=6), max_penalised=2)
    runner = runner_class(config)
    params = [replace(greedy(6), presence_penalty=float(i % 3 > 0)) for i in range(9)]
    with Engine(runner) as engine:
        sent = [engine.submit(prompt(4, i), sampling_params=each) for i, each in enumerate(params)]
        started: list[int] = []
        while engine.has_work():
            engine.step()
            engine.scheduler.check_integrity()
            held = [each for each in engine.scheduler.running() if each.params.has_penalties]
            rows = [int(engine.scheduler.replicas[0].table.count_row[each.slot]) for each in held]
            assert len(held) <= 2 and len(set(rows)) == len(rows) and set(rows) <= {0, 1}
            started += [each.id for each in sent if each.output_ids and each.id not in started]
    assert [each.take_result() for each in sent] == [expected_tokens(config, prompt(4, i), 6) for i in range(9)]
    assert started == sorted(started)


def test_more_penalised_sequences_than_sequences_are_refused() -> None:
    for number in (0, 5):
        with pytest.raises(InvalidRequest, match=f"max_penalised={number}.*1 to max_sequences"):
            RunnerConfig(max_sequences=4, max_penalised=number)
    assert (RunnerConfig(max_sequences=4).count_rows, RunnerConfig(max_sequences=4, max_penalised=3).count_rows) == (
        4,
        3,
    )
