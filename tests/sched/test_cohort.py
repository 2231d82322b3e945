"""The sticky decode cohort: who is in it, when it is made anew, and what it reads again."""

from __future__ import annotations

import pytest

from resin import Engine, Phase, SamplingParams
from resin.sched.cohort import Cohort
from tests.fakes import VOCAB, OverlapFake, PagedFake, fake_config, history_group, state_group, window_group

RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])


def engine_with(
    runner_class: type[PagedFake] = PagedFake, *, sizes: tuple[int, ...] = (3, 5), count: int = 20
) -> Engine:
    config = fake_config((history_group(), window_group(6), state_group(16, rows=20)))
    engine = Engine(runner_class(config), prefix_cache=True)
    for i, size in enumerate(sizes):
        engine.submit([i + 1] * size, sampling_params=SamplingParams(max_output_tokens=count, temperature=0))
    while engine.scheduler.prefilling or len(engine.scheduler.queue):
        engine.step()
    engine.step()
    return engine


def cohort_of(engine: Engine) -> Cohort:
    cohort = engine.scheduler._cohort
    assert cohort is not None
    return cohort


@RUNNERS
def test_a_cohort_stays_while_its_rows_go_on(runner_class: type[PagedFake]) -> None:
    engine = engine_with(runner_class)
    first = cohort_of(engine)
    for _ in range(10):
        engine.step()
        assert cohort_of(engine) is first
    engine.submit([9], sampling_params=SamplingParams(max_output_tokens=2))
    engine.step()
    engine.step()
    assert engine.scheduler._cohort is not first
    engine.close()


@RUNNERS
def test_a_cohort_ends_with_the_first_row_that_does(runner_class: type[PagedFake]) -> None:
    engine = engine_with(runner_class, count=6)
    short = engine.submit([7], sampling_params=SamplingParams(max_output_tokens=3))
    sizes = []
    while engine.has_work():
        engine.step()
        plan = engine.runner.plans[-1]  # type: ignore[attr-defined]
        if plan.phase is Phase.DECODE:
            sizes.append((plan.num_sequences, short.is_finished))
    assert all(size <= 2 for size, finished in sizes[3:] if finished)
    assert max(size for size, _ in sizes) == 3
    assert len(short.output_ids) == 3, "no row is planned past its limit"
    emitted = [plan.request_ids.count(short.id) for plan in engine.runner.plans]  # type: ignore[attr-defined]
    assert sum(emitted) == 3


def test_a_cohort_knows_its_rows() -> None:
    engine = engine_with(sizes=(3, 5, 8))
    cohort, table = cohort_of(engine), engine.scheduler.table
    assert [cohort.index[request.slot] for request in cohort.requests] == [0, 1, 2]
    assert cohort.ids == tuple(request.id for request in cohort.requests)
    assert cohort.slots.tolist() == [request.slot for request in cohort.requests]
    room = table.max_outputs[cohort.slots] - table.outputs[cohort.slots]
    assert cohort.steps_left == room.min()
    for _ in range(9):
        assert [cohort.position(i) for i in range(3)] == table.computed[cohort.slots].tolist()
        for span in (1, 2, 4, 7):
            assert cohort.starting(span) == [i for i in range(3) if cohort.position(i) % span == 0]
        engine.step()
        assert cohort_of(engine) is cohort
    engine.close()


def test_stop_lists_are_as_wide_as_the_longest() -> None:
    config = fake_config((history_group(),))
    with Engine(PagedFake(config)) as engine:
        for stops in ((), (VOCAB - 1,), (1, 2, 3)):
            params = SamplingParams(max_output_tokens=9, stop_token_ids=stops, ignore_stop=False)
            engine.submit([1], sampling_params=params)
        engine.submit([1], sampling_params=SamplingParams(stop_token_ids=tuple(range(9)), ignore_stop=True))
        engine.step()
        engine.scheduler._plan_decode(in_flight=False)
        assert cohort_of(engine).stop_ids.shape == (3, 4)


@RUNNERS
def test_constrained_rows_decode_beside_others_and_wait_for_their_tokens(runner_class: type[PagedFake]) -> None:
    runner = runner_class(fake_config((history_group(),)))
    with Engine(runner) as engine:
        seen: list[int] = []
        constrained = engine.submit(
            [1],
            sampling_params=SamplingParams(
                max_output_tokens=6,
                allowed_tokens=lambda output: seen.append(len(output)),  # type: ignore[func-returns-value]
            ),
        )
        free = engine.submit([2], sampling_params=SamplingParams(max_output_tokens=6))
        while engine.has_work():
            engine.step()
        assert seen == list(range(6)) and len(constrained.output_ids) == len(free.output_ids) == 6
    together = [set(plan.request_ids) == {0, 1} for plan in runner.plans]
    assert together[0] and (runner_class is OverlapFake or all(together))
