"""The Engine's public behaviour on runners without arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from resin import (
    BatchPlan,
    Engine,
    EngineFailed,
    FinishedEvent,
    FinishReason,
    ForwardOutput,
    InvalidRequest,
    Phase,
    PlanRejected,
    Policy,
    Request,
    RequestFailed,
    RowFlag,
    SamplingParams,
    TokensEvent,
)
from tests.fakes import VOCAB, OverlapFake, PagedFake, expected_tokens, fake_config, history_group, state_group

CONFIG = fake_config((history_group(),))
GREEDY = SamplingParams(max_output_tokens=6, temperature=0)


def drain(engine: Engine) -> list[object]:
    events: list[object] = []
    while engine.has_work():
        events.extend(engine.step())
    return events


class Constant:
    """The seed of every custom runner: one method."""

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        return ForwardOutput(
            token_ids=np.zeros(plan.num_sequences, dtype=np.uint32),
            token_indptr=np.arange(plan.num_sequences + 1, dtype=np.uint32),
        )


def test_a_runner_needs_one_method() -> None:
    with Engine(Constant(), context_length=32768) as engine:
        params = SamplingParams(max_output_tokens=8, stop_token_ids=(2,), temperature=1.0, top_p=0.95)
        request = engine.submit([1, 6, 24131], sampling_params=params)
        events = drain(engine)
    assert request.take_result() == [0] * 8
    assert isinstance(events[0], TokensEvent) and isinstance(events[-1], FinishedEvent)
    assert sum(len(event.token_ids) for event in events if isinstance(event, TokensEvent)) == 8


def test_a_stop_token_ends_the_request_and_belongs_to_it() -> None:
    with Engine(Constant()) as engine:
        request = engine.submit([5], sampling_params=SamplingParams(max_output_tokens=9, stop_token_ids=(0,)))
        ignoring = engine.submit(
            [5], sampling_params=SamplingParams(max_output_tokens=3, stop_token_ids=(0,), ignore_stop=True)
        )
        drain(engine)
    assert request.take_result() == [0] and request.finish_reason is FinishReason.STOP
    assert ignoring.take_result() == [0, 0, 0] and ignoring.finish_reason is FinishReason.LENGTH


def test_the_context_bounds_the_output() -> None:
    with Engine(Constant(), context_length=10) as engine:
        request = engine.submit(range(7), sampling_params=SamplingParams(max_output_tokens=100))
        drain(engine)
    assert len(request.take_result()) == 3 and request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        ([], "token_ids"),
        ([[1]], "token_ids"),
        ([0.5], "token_ids"),
        ([VOCAB], "token_ids"),
        ([-1], "token_ids"),
        (list(range(200)) * 2, "token_ids"),
        ("abc", "token_ids"),
        ([True], "token_ids"),
    ],
)
def test_bad_prompts_are_refused_before_anything_is_queued(tokens: object, field: str) -> None:
    with Engine(PagedFake(CONFIG)) as engine:
        with pytest.raises(InvalidRequest) as error:
            engine.submit(tokens)  # type: ignore[arg-type]
        assert error.value.field == field and not engine.has_work()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"context_length": 1}, "context_length"),
        ({"context_length": 10_000}, "context_length"),
        ({"cache_pages": 1}, "cache_pages"),
        ({"cache_pages": 5}, "context_length"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Engine(PagedFake(CONFIG), **settings)  # type: ignore[arg-type]
    assert error.value.field == field


def test_unfinished_and_cancelled_results() -> None:
    with Engine(PagedFake(CONFIG)) as engine:
        request = engine.submit([1, 2], sampling_params=GREEDY)
        with pytest.raises(RuntimeError):
            request.take_result()
        engine.step()
        engine.cancel(request)
        engine.cancel(request)
        assert engine.has_work()
        events = drain(engine)
        assert [event.reason for event in events if isinstance(event, FinishedEvent)] == [FinishReason.CANCELLED]
        assert request.take_result() == expected_tokens(CONFIG, [1, 2], 6)[: len(request.output_ids)]
        assert engine.scheduler.replicas[0].cache.pool.leased == 0


def test_deadlines_end_waiting_and_running_requests() -> None:
    now = [0.0]
    with Engine(PagedFake(CONFIG), clock=lambda: now[0]) as engine:
        running = [
            engine.submit([i + 1], sampling_params=SamplingParams(max_output_tokens=90), deadline_s=5) for i in range(4)
        ]
        waiting = engine.submit([9], deadline_s=3)
        for _ in range(4):
            engine.step()
        now[0] = 3.5
        engine.step()
        assert waiting.finish_reason is FinishReason.DEADLINE and not waiting.output_ids
        now[0] = 5.5
        drain(engine)
        assert {request.finish_reason for request in running} == {FinishReason.DEADLINE}
        assert all(request.output_ids for request in running)


def test_priorities_go_first_and_waiting_earns_priority() -> None:
    now = [0.0]
    one_slot = fake_config((history_group(),), max_sequences=1)
    with Engine(PagedFake(one_slot), clock=lambda: now[0], policy=Policy(aging_s=10)) as engine:
        engine.submit([1], sampling_params=GREEDY)
        engine.step()
        low = engine.submit([2], sampling_params=GREEDY)
        high = engine.submit([3], sampling_params=GREEDY, priority=1)
        now[0] = 10.5
        late = engine.submit([4], sampling_params=GREEDY, priority=1)
        ends = [event.request for event in drain(engine) if isinstance(event, FinishedEvent)]
    assert ends[1:] == [high, low, late], "the late one is worth less than the 10 s that the low one has waited"


def test_prefill_goes_first_but_decoding_rows_get_their_turn() -> None:
    runner = PagedFake(fake_config((history_group(),), max_plan_tokens=8))
    with Engine(runner, policy=Policy(prefill_streak_tokens=16)) as engine:
        engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=30, temperature=0))
        engine.step()
        engine.submit(list(range(60)), sampling_params=GREEDY)
        for _ in range(9):
            engine.step()
    phases = "".join("p" if plan.phase is Phase.PREFILL else "d" for plan in runner.plans)
    assert phases.startswith("pppdppdppd"), phases


SYNC_STAGES = [(PagedFake, stage) for stage in ("plan", "accept", "forward", "commit")]
OVERLAP_STAGES = [(OverlapFake, stage) for stage in ("plan", "accept", "dispatch", "collect", "commit")]


@pytest.mark.parametrize(("runner_class", "stage"), SYNC_STAGES + OVERLAP_STAGES)
def test_a_failing_stage(runner_class: type[PagedFake], stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_class(CONFIG)
    engine = Engine(runner, prefix_cache=True)
    requests = [engine.submit([i, 2, 3, 4, 5], sampling_params=GREEDY) for i in range(6)]
    for _ in range(3):
        engine.step()
    fault = PlanRejected("not now") if stage == "accept" else OSError("boom")
    if stage == "plan":
        monkeypatch.setattr(engine.scheduler.replicas[0].planner, "plan_decode", _raiser(fault))
    elif stage == "commit":
        monkeypatch.setattr("resin.sched.scheduler.commit", _raiser(fault))
    else:
        runner.fail[stage] = fault
    before = [list(request.output_ids) for request in requests]
    if stage in ("accept", "plan"):
        with pytest.raises(type(fault)):
            engine.step()
        assert [list(request.output_ids) for request in requests] == before
        engine.scheduler.check_integrity()
        monkeypatch.undo()
        drain(engine)
        for i, request in enumerate(requests):
            assert request.take_result() == expected_tokens(CONFIG, [i, 2, 3, 4, 5], 6)
        assert engine.scheduler.replicas[0].cache.pool.leased == 0
        return
    with pytest.raises(EngineFailed, match="boom"):
        engine.step()
    ended = {event.request for event in engine.drain_events() if isinstance(event, FinishedEvent)}
    assert ended == set(requests) and not engine.has_work()
    for request in requests:
        assert request.finish_reason is FinishReason.ERROR and request.error is fault
        with pytest.raises(RequestFailed, match="boom"):
            request.take_result()
    leased = engine.scheduler.replicas[0].cache.pool.leased
    for call in (engine.step, lambda: engine.submit([1])):
        with pytest.raises(EngineFailed):
            call()
    assert engine.scheduler.replicas[0].cache.pool.leased == leased, "no page may be handed out again"
    engine.close()


def _raiser(fault: Exception):  # type: ignore[no-untyped-def]
    def fail(*args: object, **kwargs: object) -> None:
        raise fault

    return fail


@pytest.mark.parametrize(
    "output",
    [
        ForwardOutput(np.zeros(1, np.int32), np.array([0, 1, 1])),
        ForwardOutput(np.zeros(2, np.int32), np.array([0, 2])),
        ForwardOutput(np.array([VOCAB]), np.array([0, 1])),
        ForwardOutput(np.array([-3]), np.array([0, 1])),
        ForwardOutput(np.zeros(0, np.int32), np.array([0, 0])),
    ],
    ids=["rows", "two tokens", "beyond vocabulary", "negative", "no token"],
)
def test_an_output_that_does_not_fit_its_plan_quarantines(output: ForwardOutput) -> None:
    class Broken(PagedFake):
        def forward(self, plan: BatchPlan) -> ForwardOutput:
            return output

    engine = Engine(Broken(CONFIG))
    request = engine.submit([1, 2, 3])
    with pytest.raises(EngineFailed):
        engine.step()
    assert request.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_overlap_discards_the_extra_rows_and_returns_pages_once(overlap: int) -> None:
    runner = OverlapFake(CONFIG)
    with Engine(runner, overlap=overlap) as engine:
        want = expected_tokens(CONFIG, [1, 2, 3], 12)
        stop = want[4]
        params = SamplingParams(max_output_tokens=12, stop_token_ids=(stop,), temperature=0)
        request = engine.submit([1, 2, 3], sampling_params=params)
        drain(engine)
        assert request.take_result() == want[: want.index(stop) + 1]
        assert len(runner.plans) == len(request.output_ids) + overlap, "rows ran past the stop"
        assert engine.scheduler.replicas[0].cache.pool.free == engine.scheduler.replicas[0].cache.pool.total
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("overlap", [-1, 5, 1.5, "deep"])
def test_overlap_out_of_range_is_refused(overlap: object) -> None:
    with pytest.raises(InvalidRequest, match="overlap"):
        Engine(OverlapFake(CONFIG), overlap=overlap)  # type: ignore[arg-type]


def test_overlap_and_synchronous_order_give_the_same_plans() -> None:
    plans = []
    for overlap in (0, 1, 2, 4):
        runner = OverlapFake(CONFIG)
        with Engine(runner, overlap=overlap) as engine:
            for i in range(5):
                engine.submit([i, 1, 2] * 5, sampling_params=GREEDY)
            drain(engine)
        plans.append([(plan.phase, plan.request_ids) for plan in runner.plans])
    assert all(other == plans[0] for other in plans[1:])


def test_a_failing_mask_ends_only_its_request() -> None:
    def broken(output: list[int]) -> np.ndarray:
        if len(output) == 2:
            raise KeyError("grammar")
        return np.ones(VOCAB, np.bool_)

    with Engine(OverlapFake(CONFIG)) as engine:
        bad = engine.submit([1, 2], sampling_params=SamplingParams(max_output_tokens=6, allowed_tokens=broken))  # type: ignore[arg-type]
        good = engine.submit([3, 4], sampling_params=GREEDY)
        drain(engine)
        assert bad.finish_reason is FinishReason.ERROR and len(bad.output_ids) == 2
        assert good.take_result() == expected_tokens(CONFIG, [3, 4], 6)
        engine.scheduler.check_integrity()


def test_masks_see_every_token_before_the_next_is_chosen() -> None:
    seen: list[int] = []

    def watch(output: list[int]) -> None:
        seen.append(len(output))

    runner = OverlapFake(CONFIG)
    with Engine(runner) as engine:
        engine.submit([1, 2], sampling_params=SamplingParams(max_output_tokens=5, allowed_tokens=watch))  # type: ignore[arg-type]
        drain(engine)
    assert seen == [0, 1, 2, 3, 4]
    assert all(plan.allowed_masks is not None and plan.allowed_masks.shape[1] == 8 for plan in runner.plans)


def test_flags_and_loads_of_a_row() -> None:
    runner = PagedFake(CONFIG)
    params = SamplingParams(
        max_output_tokens=4, temperature=0.7, top_k=5, logit_bias={3: 1.5}, min_output_tokens=2, stop_token_ids=(9,),
        presence_penalty=0.5, seed=2**40 + 7, logprobs=3,
    )  # fmt: skip
    with Engine(runner) as engine:
        engine.submit(list(range(40)), sampling_params=params)
        drain(engine)
    first, second, third = runner.plans[0], runner.plans[1], runner.plans[2]
    assert not first.row_flags[0] & RowFlag.EMIT and not first.slot_loads
    flags = RowFlag(int(second.row_flags[0]))
    assert flags == (RowFlag.EMIT | RowFlag.BIAS | RowFlag.PENALTIES | RowFlag.SUPPRESS_STOP | RowFlag.LOGPROBS)
    load = second.slot_loads[0]
    assert load.token_ids.tolist() == list(range(40)) and load.prompt_tokens == 40
    assert load.bias_ids.tolist() == [3] and load.stop_ids.tolist() == [9]
    assert third.row_flags[0] & RowFlag.SUPPRESS_STOP and not third.slot_loads
    assert not runner.plans[3].row_flags[0] & RowFlag.SUPPRESS_STOP
    assert third.top_logprobs == 3 and third.sampling["seed_low"][0] == 7 and third.sampling["seed_high"][0] == 2**8


def test_a_request_resumes_after_retraction_with_its_rank_and_tokens() -> None:
    config = fake_config((history_group(), state_group(8, rows=20)), max_sequences=3)
    runner = OverlapFake(config)
    with Engine(runner, context_length=96, cache_pages=46) as engine:
        params = SamplingParams(max_output_tokens=80, temperature=0)
        requests: list[Request] = [engine.submit([i] * 12, sampling_params=params) for i in range(3)]
        drain(engine)
        assert engine.scheduler.replicas[0].retractions > 0 and requests[0].retractions == 0
        for i, request in enumerate(requests):
            assert request.take_result() == expected_tokens(config, [i] * 12, 80)


def test_close_cancels_what_runs() -> None:
    engine = Engine(OverlapFake(CONFIG))
    requests = [engine.submit([i + 1], sampling_params=GREEDY) for i in range(8)]
    engine.step()
    engine.close()
    engine.close()
    assert {request.finish_reason for request in requests} == {FinishReason.CANCELLED}
    assert engine.scheduler.replicas[0].cache.pool.leased == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_before_wait_is_called_when_the_runner_has_its_plan(overlap: bool) -> None:
    calls: list[str] = []

    class Noting(OverlapFake):
        def forward(self, plan: BatchPlan) -> ForwardOutput:
            calls.append("forward")
            return super().forward(plan)

        def dispatch(self, plan: BatchPlan) -> ForwardOutput:
            calls.append("dispatch")
            return super().dispatch(plan)

        def collect(self, handle: ForwardOutput) -> ForwardOutput:
            calls.append("collect")
            return super().collect(handle)

    with Engine(Noting(CONFIG), overlap=overlap) as engine:
        engine.before_wait = lambda: calls.append("wait")
        engine.submit([5, 6], sampling_params=SamplingParams(max_output_tokens=3, temperature=0))
        drain(engine)
    if overlap:
        assert calls[:4] == ["dispatch", "dispatch", "wait", "collect"]
        assert calls.count("wait") == calls.count("collect") == calls.count("dispatch")
    else:
        assert [call for call in calls if call in ("forward", "wait")] == ["wait", "forward"] * 3
