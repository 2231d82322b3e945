"""Rounds: when they begin, how long they last, and whose turn comes first."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from resin import BatchPlan, Engine, FinishReason, ForwardOutput, Request, SamplingParams
from resin.events import FinishedEvent, TokensEvent
from serve.actor import EngineActor, Job
from serve.delivery import GAPLESS_ROUND_S, PATIENCE_S, REST_PER_BUSY, ROUND_PER_WAIT, Delivery


class StillLoop:
    """An event loop whose clock only a test moves, and whose callbacks only a test runs."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.soon: list[Callable[[], None]] = []
        self.timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.now_s

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_at(self, at_s: float, callback: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(at_s=at_s, callback=callback)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer


class Recorder:
    """A receiver whose flush takes `flush_s` and is written down."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self._rounds = rounds
        self._number = number
        self._pending: list[int] = []

    def on_tokens(self, token_ids: list[int], event: TokensEvent, begin: int) -> bool:
        self._pending += token_ids
        return True

    def on_finish(self, reason: FinishReason, error: BaseException | None) -> bool:
        return False

    def flush(self) -> None:
        self._rounds.loop.now_s += self._rounds.flush_s
        self._rounds.flushed.append((self._number, self._pending))
        self._pending = []


class Rounds:
    """Three recorders behind a Delivery."""

    def __init__(self, flush_s: float, *, waited_s: float = 0.01) -> None:
        self.flush_s = flush_s
        self.loop = StillLoop()
        self.flushed: list[tuple[int, list[int]]] = []
        self._requests = tuple(cast(Request, SimpleNamespace(id=number)) for number in range(3))
        jobs = {number: Job((1,), SamplingParams(), Recorder(self, number)) for number in range(3)}
        self._actor = SimpleNamespace(outbox=deque(), jobs=jobs, waited_s=waited_s)
        self._delivery = Delivery(cast(asyncio.AbstractEventLoop, self.loop))
        self._delivery.attach(cast(EngineActor, self._actor))

    def step(self, token: int) -> None:
        """What a step brings to all, and the sign that the engine gives."""
        tokens = np.full(3, token, np.int32)
        self._actor.outbox.append([TokensEvent(self._requests, tokens, np.arange(4))])
        self._delivery.wake()
        while self.loop.soon:
            self.loop.soon.pop(0)()


@pytest.mark.parametrize("waited_s", [0.0, 0.02])
def test_a_long_round_leaves_the_rest_to_the_next_where_it_comes_first(waited_s: float) -> None:
    rounds = Rounds(flush_s=0.6 * (waited_s * ROUND_PER_WAIT or GAPLESS_ROUND_S), waited_s=waited_s)
    rounds.step(7)
    assert rounds.flushed == [(0, [7]), (1, [7])]
    rounds.loop.now_s += 1
    rounds.step(8)
    assert rounds.flushed[2:] == [(2, [7, 8]), (0, [8])]
    assert len(rounds.loop.timers) == 1  # for what is left


def test_between_rounds_the_loop_rests() -> None:
    rounds = Rounds(flush_s=0.001)
    rounds.step(1)
    ended_s = rounds.loop.now_s
    assert [tokens for _, tokens in rounds.flushed] == [[1]] * 3 and not rounds.loop.timers
    rounds.loop.now_s += 0.9 * REST_PER_BUSY * 0.003
    rounds.step(2)
    rounds.step(3)
    assert len(rounds.flushed) == 3  # too early for both
    (timer,) = rounds.loop.timers  # in case that nothing follows
    assert timer.at_s == pytest.approx(ended_s + 0.003 * REST_PER_BUSY + PATIENCE_S)
    rounds.loop.now_s = ended_s + 0.001
    rounds.step(4)
    assert [tokens for _, tokens in rounds.flushed[3:]] == [[2, 3, 4]] * 3
    assert not rounds.loop.timers


def test_what_came_during_the_rest_does_not_wait_for_another_step() -> None:
    rounds = Rounds(flush_s=0.001)
    rounds.step(1)
    rounds.step(2)
    (timer,) = rounds.loop.timers
    rounds.loop.now_s = timer.at_s
    timer.callback()
    assert [tokens for _, tokens in rounds.flushed[3:]] == [[2]] * 3


class Watched:
    """Writes its calls into `signs`."""

    def __init__(self, signs: list[str]) -> None:
        self._signs = signs

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        self._signs.append("forward")
        rows = plan.num_sequences
        return ForwardOutput(np.zeros(rows, np.int32), np.arange(rows + 1))


def test_the_actor_gives_its_sign_only_when_nothing_but_the_runner_has_work() -> None:
    signs: list[str] = []
    woken = threading.Semaphore(0)

    def wake() -> None:
        signs.append("wake")
        woken.release()

    actor = EngineActor(
        Engine(Watched(signs)),
        queue_capacity=1,
        max_active=1,
        admissions_per_step=1,
        stall_timeout_s=60,
        wake=wake,
        on_failure=lambda error: None,
    )
    receiver = Recorder(Rounds(0.0), 0)
    actor.submit([Job([1, 2], SamplingParams(max_output_tokens=3), receiver)])
    actor.start()
    assert all(woken.acquire(timeout=5) for _ in range(3))
    actor.stop()
    # What a step brought is announced right before the runner gets the next plan, or at the end of all work.
    assert signs == ["forward", "wake", "forward", "wake", "forward", "wake"] + ["wake"] * (len(signs) - 6)
    events = [event for events in actor.outbox for event in cast(Any, events)]
    assert [type(event) for event in events] == [TokensEvent] * 3 + [FinishedEvent]
