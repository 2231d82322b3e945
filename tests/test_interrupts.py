"""Ctrl-C: noted while a transaction runs, raised after it, and never the cause of a half-done step."""

from __future__ import annotations

import random
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from resin import BatchPlan, Engine, EngineFailed, FinishReason, ForwardOutput, Request, SamplingParams
from resin.interrupts import Uninterrupted
from tests.fakes import OverlapFake, PagedFake, expected_tokens, fake_config, history_group

CONFIG = fake_config((history_group(),))
GREEDY = SamplingParams(max_output_tokens=6, temperature=0)
PROMPT = [1, 2, 3, 4, 5]


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def drain(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def test_the_first_press_waits_for_the_end_and_the_second_does_not() -> None:
    context, reached = Uninterrupted(), []
    with pytest.raises(KeyboardInterrupt), context:
        press()
        reached.append("after the first")
        press()
        reached.append("after the second")
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with context:
        assert not context.is_requested, "an earlier press is over"


def test_a_press_that_is_taken_notice_of_is_not_raised() -> None:
    with Uninterrupted() as context:
        press()
        assert context.is_requested
        context.is_requested = False


def test_an_error_does_not_hide_a_press() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Uninterrupted():
        press()
        raise OSError("boom")
    assert isinstance(caught.value.__cause__, OSError)


def test_inner_contexts_leave_it_to_the_outer_one() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        with Uninterrupted():
            press()
        reached.append("outer")
    assert reached == ["outer"]


def test_handlers_of_the_program_and_other_threads_are_left_alone() -> None:
    calls: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    previous = signal.signal(signal.SIGINT, own)
    try:
        with Uninterrupted():
            press()
            assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)

    def enter() -> None:
        with Uninterrupted():
            calls.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert calls == [signal.SIGINT, True]


class Pressing(OverlapFake):
    """Presses Ctrl-C at one stage of one plan, as often as told."""

    def __init__(self, stage: str, presses: int) -> None:
        super().__init__(CONFIG)
        self._stage = stage
        self._presses = presses

    def _reach(self, stage: str) -> None:
        if stage == self._stage and len(self.plans) >= 2:
            for _ in range(self._presses):
                self._presses -= 1
                press()

    def accept(self, plan: BatchPlan) -> None:
        self._reach("accept")

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        self._reach("forward")
        return super().forward(plan)

    def dispatch(self, plan: BatchPlan) -> ForwardOutput:
        self._reach("dispatch")
        return super().dispatch(plan)

    def collect(self, handle: ForwardOutput) -> ForwardOutput:
        self._reach("collect")
        return super().collect(handle)


STAGES = [("accept", 1), ("dispatch", 1), ("collect", 1), ("forward", 0)]


@pytest.mark.parametrize(("stage", "overlap"), STAGES)
def test_the_step_is_done_and_the_engine_goes_on(stage: str, overlap: int) -> None:
    with Engine(Pressing(stage, 1), overlap=overlap) as engine:
        request = engine.submit(PROMPT, sampling_params=GREEDY)
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        engine.scheduler.check_integrity()
        drain(engine)
        assert request.take_result() == expected_tokens(CONFIG, PROMPT, 6)
        assert engine.scheduler.replicas[0].cache.pool.leased == 0


@pytest.mark.parametrize(("stage", "overlap"), STAGES)
def test_a_second_press_quarantines_and_is_what_the_user_sees(stage: str, overlap: int) -> None:
    engine = Engine(Pressing(stage, 2), overlap=overlap)
    request = engine.submit(PROMPT, sampling_params=GREEDY)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert request.finish_reason is FinishReason.ERROR and not engine.has_work()
    with pytest.raises(EngineFailed, match="KeyboardInterrupt"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("stage", ["forward", "accept"])
def test_interrupts_of_another_origin_are_not_turned_into_failures(stage: str) -> None:
    runner = PagedFake(CONFIG)
    with pytest.raises(KeyboardInterrupt), Engine(runner) as engine:
        engine.submit(PROMPT, sampling_params=GREEDY)
        runner.fail[stage] = KeyboardInterrupt()
        drain(engine)


def test_an_error_while_leaving_does_not_hide_the_interrupt() -> None:
    runner = OverlapFake(CONFIG)
    with pytest.raises(KeyboardInterrupt), Engine(runner) as engine:
        engine.submit(PROMPT, sampling_params=GREEDY)
        engine.step()
        runner.fail["collect"] = OSError("boom")
        raise KeyboardInterrupt


def test_a_press_while_submitting_leaves_nobody_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(OverlapFake(CONFIG)) as engine:
        submit, queued = engine.scheduler.submit, []

        def interrupted(request: Request) -> None:
            press()
            submit(request)
            queued.append(request)

        monkeypatch.setattr(engine.scheduler, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.submit(PROMPT, sampling_params=GREEDY)
        assert queued[0].finish_reason is FinishReason.CANCELLED
        drain(engine)
        assert not list(engine.scheduler.running())


class PressAtLine:
    """A trace function that presses Ctrl-C at the n-th line that runs."""

    def __init__(self, line: int) -> None:
        self.lines = 0
        self._line = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> PressAtLine:
        self.lines += event == "line"
        if event == "line" and self.lines == self._line:
            press()
        return self


def run_with_a_press(line: int) -> tuple[int, int]:
    """Two requests, interrupted once and taken up again; returns lines that ran and interrupts seen."""
    trace, interrupts = PressAtLine(line), 0
    engine = Engine(OverlapFake(CONFIG), prefix_cache=True)
    requests: list[Request] = []
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        while True:
            try:
                if requests and not engine.has_work():
                    break
                if not requests:
                    requests.append(engine.submit(PROMPT, sampling_params=GREEDY))
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        sys.settrace(previous)
    engine.scheduler.check_integrity()
    assert requests[-1].take_result() == expected_tokens(CONFIG, PROMPT, 6)
    engine.close()
    assert engine.scheduler.replicas[0].cache.pool.leased == 0
    return trace.lines, interrupts


def test_no_moment_is_wrong_for_a_press() -> None:
    lines, _ = run_with_a_press(0)
    rng = random.Random(3)
    seen = sum(run_with_a_press(rng.randrange(1, lines))[1] for _ in range(60))
    assert seen > 40, "most presses are seen where they are made"
