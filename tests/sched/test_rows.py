"""Decode rows: who has which place, and what a change touches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resin import Engine, Phase, SamplingParams
from resin.plan import NOBODY
from resin.sched.rows import DecodeRows
from resin.sched.slots import ACCEPTED
from tests.fakes import VOCAB, OverlapFake, PagedFake, fake_config, history_group, state_group, window_group

RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])


def engine_with(
    runner_class: type[PagedFake] = PagedFake, *, sizes: tuple[int, ...] = (3, 5), count: int = 20
) -> Engine:
    config = fake_config((history_group(), window_group(6), state_group(16, rows=20)))
    engine = Engine(runner_class(config), prefix_cache=True)
    for i, size in enumerate(sizes):
        engine.submit([i + 1] * size, sampling_params=SamplingParams(max_output_tokens=count, temperature=0))
    while engine.scheduler.replicas[0].prefill.requests or len(engine.scheduler.queue):
        engine.step()
    engine.step()
    return engine


def last_ids(engine: Engine) -> tuple[int, ...]:
    plans = [plan for plan in engine.runner.plans if plan.phase is Phase.DECODE]  # type: ignore[attr-defined]
    return plans[-1].request_ids


@RUNNERS
def test_a_request_keeps_its_place_while_others_come_and_go(runner_class: type[PagedFake]) -> None:
    with engine_with(runner_class, sizes=(3, 5, 8, 2)) as engine:
        requests = list(engine.scheduler.replicas[0].decode.requests)
        places = {request: engine.scheduler.replicas[0].decode.rows.place(request) for request in requests}
        assert sorted(places.values()) == [0, 1, 2, 3]
        gone = min(places, key=lambda request: places[request])
        engine.cancel(gone)
        for _ in range(3):
            engine.step()
        assert last_ids(engine)[0] == NOBODY, "its place is padding"
        late = engine.submit([9], sampling_params=SamplingParams(max_output_tokens=4))
        seen = set()
        while not late.is_finished:
            engine.step()
            for request in requests:
                if request in engine.scheduler.replicas[0].decode.rows:
                    assert engine.scheduler.replicas[0].decode.rows.place(request) == places[request]
            seen.add(last_ids(engine)[0])
        assert late.id in seen, "the lowest empty place"


@RUNNERS
def test_no_row_is_planned_past_its_limit(runner_class: type[PagedFake]) -> None:
    with engine_with(runner_class, count=6) as engine:
        short = engine.submit([7], sampling_params=SamplingParams(max_output_tokens=3))
        while engine.has_work():
            engine.step()
        emitted = [plan.request_ids.count(short.id) for plan in engine.runner.plans]  # type: ignore[attr-defined]
        assert sum(emitted) == len(short.output_ids) == 3


def test_rows_move_down_when_a_smaller_bucket_would_do() -> None:
    with engine_with(sizes=(3, 5, 8, 2)) as engine:  # buckets of 1 and 4 rows
        *others, last = sorted(
            engine.scheduler.replicas[0].decode.requests, key=engine.scheduler.replicas[0].decode.rows.place
        )
        for request in others[:2]:
            engine.cancel(request)
        engine.step()
        assert engine.scheduler.replicas[0].decode.rows.place(last) == 3 and len(last_ids(engine)) == 4
        engine.cancel(others[2])
        engine.step()
        assert engine.scheduler.replicas[0].decode.rows.place(last) == 0 and last_ids(engine) == (last.id,)


def test_positions_and_page_starts_follow_from_what_was_computed() -> None:
    with engine_with(sizes=(3, 5, 8)) as engine:
        rows, table = engine.scheduler.replicas[0].decode.rows, engine.scheduler.replicas[0].table
        for _ in range(9):
            computed = [int(table.computed[rows.request(place).slot]) for place in range(3)]
            assert [rows.position(place) for place in range(3)] == computed
            for group in engine.scheduler.replicas[0].cache.paged:
                span = group.span_tokens
                assert rows.starting(span) == [place for place in range(3) if computed[place] % span == 0]
            engine.step()


def test_stop_lists_are_as_wide_as_the_longest() -> None:
    with Engine(PagedFake(fake_config((history_group(),)))) as engine:
        for stops in ((), (VOCAB - 1,), (1, 2, 3)):
            engine.submit([1], sampling_params=SamplingParams(max_output_tokens=9, stop_token_ids=stops))
        engine.submit([1], sampling_params=SamplingParams(stop_token_ids=tuple(range(9)), ignore_stop=True))
        engine.step()
        engine.scheduler.replicas[0].decode.settle()
        assert engine.scheduler.replicas[0].decode.rows.live().stop_ids.shape == (3, 4)


@RUNNERS
def test_constrained_rows_decode_beside_others_and_wait_for_their_tokens(runner_class: type[PagedFake]) -> None:
    runner = runner_class(fake_config((history_group(),)))
    with Engine(runner) as engine:
        seen: list[int] = []

        def note(output: list[int]) -> None:
            seen.append(len(output))

        params = SamplingParams(max_output_tokens=6, allowed_tokens=note)  # type: ignore[arg-type]
        constrained = engine.submit([1], sampling_params=params)
        free = engine.submit([2], sampling_params=SamplingParams(max_output_tokens=6))
        while engine.has_work():
            engine.step()
        assert seen == list(range(6)) and len(constrained.output_ids) == len(free.output_ids) == 6
    together = [{0, 1} <= set(plan.request_ids) for plan in runner.plans]
    assert together[0] and (runner_class is OverlapFake or all(together))


def test_rows_agree_with_a_plain_model() -> None:
    """Any order of joins, ends, pauses, steps and moves."""
    draw = random.Random(4)
    with engine_with(sizes=(3, 5, 8, 2), count=200) as engine:
        table, requests = engine.scheduler.replicas[0].table, list(engine.scheduler.replicas[0].decode.requests)
        rows = DecodeRows(table, 6)
        seated: dict[object, int] = {}
        paused: set[int] = set()
        for _ in range(2000):
            outside = [request for request in requests if request not in seated]
            choice = draw.random()
            if choice < 0.2 and outside:
                request = draw.choice(outside)
                empty = min(set(range(6)) - set(seated.values()))
                seated[request] = rows.join(request)
                assert seated[request] == empty
            elif choice < 0.3 and seated:
                request = draw.choice(list(seated))
                paused.discard(seated[request])
                rows.leave(seated.pop(request))
            elif choice < 0.5:
                paused = {place for place in seated.values() if draw.random() < 0.3}
                rows.pause(paused)
            elif choice < 0.53:
                rows.compact()
                order = sorted(seated, key=lambda request: (seated[request] in paused, seated[request]))
                count, seated = len(paused), {request: place for place, request in enumerate(order)}
                paused = set(range(len(order) - count, len(order)))
            elif rows.num_live:
                table.add(rows.live().slots, rows.live().runs, ACCEPTED)
                rows.advance(np.zeros(0, np.int32))
            live = {place: request for request, place in seated.items() if place not in paused}
            placed = rows.live()
            assert placed.requests == tuple(live[place] for place in sorted(live)) and rows.count == len(seated)
            assert rows.top == max(live, default=-1) + 1 == len(placed.ids)
            assert [place for place, number in enumerate(placed.ids) if number != NOBODY] == sorted(live)
            assert placed.slots.tolist() == [request.slot for request in placed.requests]
            assert np.arange(5)[placed.index].tolist() == placed.slots.tolist()
            for place, request in live.items():
                assert rows.position(place) == table.computed[request.slot]  # type: ignore[attr-defined]
            for span in (4, 7):
                assert rows.starting(span) == [place for place in sorted(live) if rows.position(place) % span == 0]
