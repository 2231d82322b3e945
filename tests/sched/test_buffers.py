"""Buffers are used again when nobody can see them any more, and never before."""

from __future__ import annotations

import numpy as np

from resin import Engine, SamplingParams
from resin.sched.buffers import BufferPool
from tests.fakes import PagedFake, fake_config, history_group


def address(buffer: np.ndarray) -> int:
    return buffer.__array_interface__["data"][0]


def test_memory_comes_back_with_its_last_view() -> None:
    pool = BufferPool()
    first = pool.take(100)
    part, place = first[10:20].view(np.float32), address(first)
    assert address(pool.take(100)) != place
    del first
    assert address(pool.take(100)) != place, "a column is still there"
    del part
    again = pool.take(100)
    assert address(again) == place and again.flags.writeable and again.dtype == np.int32


def test_sizes_do_not_mix_and_kept_plans_are_let_go() -> None:
    pool = BufferPool()
    kept = [pool.take(size) for size in (5, 6) for _ in range(50)]
    assert {len(buffer) for buffer in kept} == {5, 6} and len({address(buffer) for buffer in kept}) == 100
    assert sum(map(len, pool._owned.values())) == 16


def test_plans_that_are_kept_stay_as_they_were() -> None:
    runner, kept = PagedFake(fake_config((history_group(),), max_sequences=2)), []
    runner.check = lambda plan: kept.append((plan.column("page_ids:history"), plan.buffer.tobytes(), plan.buffer[:]))
    with Engine(runner) as engine:
        for _ in range(3):
            engine.submit([1, 2, 3] * 5, sampling_params=SamplingParams(max_output_tokens=30))
        while engine.has_work():
            engine.step()
            runner.plans.clear()
            if len(kept) > 3:
                del kept[1]
    assert all(buffer.tobytes() == content for _, content, buffer in kept)


def test_steps_without_readers_share_a_few_buffers() -> None:
    runner, places = PagedFake(fake_config((history_group(),), max_sequences=2)), []
    runner.check = lambda plan: places.append((plan.bucket, address(plan.buffer)))
    with Engine(runner) as engine:
        engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=40))
        while engine.has_work():
            engine.step()
            runner.plans.clear()
    assert len(places) == 40 and len(set(places)) <= 5
