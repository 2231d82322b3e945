"""Requests and callers that nobody would write on purpose: refused by name, or served, and nobody else notices."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

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
    Request,
    RowFlag,
    SamplingParams,
)
from resin.sched.prefix import SeenPages
from tests.fakes import VOCAB, OverlapFake, PagedFake, expected_tokens, fake_config, history_group, window_group

CONFIG = fake_config((history_group(),))
GREEDY = SamplingParams(max_output_tokens=4, temperature=0)
RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])


def run(engine: Engine, max_steps: int = 5000) -> list[Any]:
    events: list[Any] = []
    while engine.has_work():
        events.extend(engine.step())
        max_steps -= 1
        assert max_steps, "no end"
    return events


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"sampling_params": {}}, "sampling_params"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"priority": "high"}, "priority"),
        ({"priority": None}, "priority"),
        ({"priority": math.nan}, "priority"),
        ({"priority": math.inf}, "priority"),
        ({"priority": 10**400}, "priority"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": b"salt"}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"sampling_params": SamplingParams(stop_token_ids=(VOCAB,))}, "stop_token_ids"),
        ({"sampling_params": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_is_queued(
    arguments: dict[str, Any], field: str
) -> None:
    with Engine(PagedFake(CONFIG), prefix_cache=True) as engine:
        with pytest.raises(InvalidRequest) as error:
            engine.submit([1, 2, 3], **arguments)
        assert error.value.field == field and not engine.has_work()
        request = engine.submit([1, 2, 3], sampling_params=GREEDY)
        run(engine)
        assert request.take_result() == expected_tokens(CONFIG, [1, 2, 3], 4)


@pytest.mark.parametrize(
    "tokens",
    [[1, [2]], (token for token in [1]), None, 5, {1, 2}, b"abc", [None], [2**70], [2**40], np.ones((2, 2), np.int32)],
    ids=lambda tokens: type(tokens).__name__,
)
def test_prompts_of_odd_types_are_refused(tokens: Any) -> None:
    with Engine(PagedFake(CONFIG)) as engine:
        with pytest.raises(InvalidRequest) as error:
            engine.submit(tokens)
        assert error.value.field == "token_ids" and not engine.has_work()


@pytest.mark.parametrize(
    "tokens", [range(5), (0, 1, 2, 3, 4), np.arange(5, dtype=np.uint8), np.arange(10, dtype=np.int64)[::2] // 2]
)
def test_prompts_of_every_integer_kind_are_taken(tokens: Any) -> None:
    with Engine(PagedFake(CONFIG)) as engine:
        request = engine.submit(tokens, sampling_params=GREEDY)
        run(engine)
        assert request.prompt_ids.dtype == np.int32 and not request.prompt_ids.flags.writeable
        assert request.take_result() == expected_tokens(CONFIG, [0, 1, 2, 3, 4], 4)


def test_what_is_no_runner_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="forward"):
        Engine(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", ["\ud800", "\x00", "💧" * 1000])
def test_any_text_salts_a_prefix(salt: str) -> None:
    with Engine(PagedFake(CONFIG), prefix_cache=True) as engine:
        hits = []
        for use in ("", salt, salt, ""):
            request = engine.submit(range(20), sampling_params=GREEDY, cache_salt=use)
            run(engine)
            assert request.take_result() == expected_tokens(CONFIG, list(range(20)), 4)
            hits.append(request.prefix_hit_tokens)
        assert hits == [0, 0, 16, 16]


def test_prompts_may_change_after_submission() -> None:
    with Engine(PagedFake(CONFIG)) as engine:
        tokens = np.arange(20, dtype=np.int32)
        bias, stops = {3: 1.0}, [VOCAB - 1]
        params = SamplingParams(
            max_output_tokens=4,
            temperature=0,
            logit_bias=bias,
            stop_token_ids=stops,  # type: ignore[arg-type]
        )
        requests = []
        for _ in range(3):
            requests.append((tokens.tolist(), engine.submit(tokens, sampling_params=params)))
            tokens[:] = tokens[::-1].copy() + 1
            bias[5] = 2.0
            stops.append(0)
        tokens[:] = 0
        run(engine)
        for prompt, request in requests:
            assert request.take_result() == expected_tokens(CONFIG, prompt, 4)
        assert params.logit_bias == {3: 1.0} and params.stop_token_ids == (VOCAB - 1,)


def test_huge_priorities_and_deadlines() -> None:
    with Engine(PagedFake(fake_config((history_group(),), max_sequences=1))) as engine:
        engine.submit([9], sampling_params=GREEDY)
        engine.step()
        sent = {
            priority: engine.submit([1, 2], sampling_params=GREEDY, priority=priority, deadline_s=deadline)
            for priority, deadline in ((-1e300, math.inf), (0, 1e308), (1e300, 1e300), (np.float32(7), 1000))
        }
        ends = [event.request for event in run(engine) if isinstance(event, FinishedEvent)]
        assert ends[1:] == [sent[1e300], sent[7], sent[0], sent[-1e300]]
        assert {request.finish_reason for request in ends} == {FinishReason.LENGTH}


@RUNNERS
def test_a_deadline_that_is_over_at_once(runner_class: type[PagedFake]) -> None:
    now = [0.0]
    with Engine(runner_class(CONFIG), clock=lambda: now[0]) as engine:
        request = engine.submit([1, 2], sampling_params=GREEDY, deadline_s=1e-9)
        now[0] = 1.0
        events = run(engine)
        assert [type(event) for event in events] == [FinishedEvent]
        assert request.finish_reason is FinishReason.DEADLINE and request.take_result() == []
        assert not engine.runner.plans  # type: ignore[attr-defined]


@RUNNERS
def test_cancelling_while_reading_events(runner_class: type[PagedFake]) -> None:
    with Engine(runner_class(CONFIG)) as engine:
        sent = [engine.submit([i, i], sampling_params=SamplingParams(max_output_tokens=50)) for i in range(4)]
        sent += [engine.submit([i, i], sampling_params=GREEDY) for i in range(4)]
        seen: dict[Request, list[int]] = {request: [] for request in sent}
        ends: list[Request] = []
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, FinishedEvent):
                    ends.append(event.request)
                    continue
                for row in event:
                    seen[row.request] += row.token_ids.tolist()
                    assert row.request not in ends, "tokens after the end"
                    if len(seen[row.request]) == 3:
                        for other in sent[:4]:
                            engine.cancel(other)
            engine.scheduler.check_integrity()
        assert sorted(request.id for request in ends) == list(range(8)), "each ends once"
        for request in sent:
            assert seen[request] == request.take_result()
        assert {request.finish_reason for request in sent[:4]} == {FinishReason.CANCELLED}
        assert {request.finish_reason for request in sent[4:]} == {FinishReason.LENGTH}


@RUNNERS
def test_a_stop_token_as_the_very_first_token(runner_class: type[PagedFake]) -> None:
    prompt = [5, 6, 7]
    want = expected_tokens(CONFIG, prompt, 1)
    with Engine(runner_class(CONFIG), prefix_cache=True) as engine:
        params = SamplingParams(max_output_tokens=9, temperature=0, stop_token_ids=(want[0],))
        for _ in range(3):
            request = engine.submit(prompt, sampling_params=params)
            run(engine)
            assert request.take_result() == want and request.finish_reason is FinishReason.STOP
        engine.scheduler.check_integrity()
        assert engine.scheduler.replicas[0].cache.pool.leased == 0


# -- callbacks ------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Engine, Request], object]] = {
    "cancel": lambda engine, request: engine.cancel(request),
    "step": lambda engine, request: engine.step(),
    "submit": lambda engine, request: engine.submit([1]),
    "close": lambda engine, request: engine.close(),
}


@RUNNERS
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_callback_that_calls_the_engine_ends_only_its_own_request(
    call: str, at: int, runner_class: type[PagedFake]
) -> None:
    with Engine(runner_class(CONFIG), prefix_cache=True) as engine:
        box: list[Request] = []

        def callback(output: Any) -> None:
            if len(output) == at:
                CALLS[call](engine, box[0])

        params = SamplingParams(max_output_tokens=5, allowed_tokens=callback)  # type: ignore[arg-type]
        box.append(engine.submit([1, 2], sampling_params=params))
        good = engine.submit([3, 4], sampling_params=GREEDY)
        while engine.has_work():
            engine.step()
            engine.scheduler.check_integrity()
        assert box[0].finish_reason is FinishReason.ERROR and isinstance(box[0].error, RuntimeError)
        assert len(box[0].output_ids) == at
        assert good.take_result() == expected_tokens(CONFIG, [3, 4], 4)


@pytest.mark.parametrize(
    "mask",
    [
        np.zeros(VOCAB, np.bool_),
        np.zeros(-(-VOCAB // 32), np.int32),
        np.ones(VOCAB + 1, np.bool_),
        np.ones(VOCAB, np.int64),
        "all",
        [1, 2, 3],
    ],
    ids=["none", "no bit", "too long", "integers", "text", "ids"],
)
def test_a_mask_that_makes_no_sense_ends_its_request(mask: Any) -> None:
    with Engine(OverlapFake(CONFIG)) as engine:
        bad = engine.submit([1], sampling_params=SamplingParams(allowed_tokens=lambda output: mask))
        good = engine.submit([3, 4], sampling_params=GREEDY)
        run(engine)
        assert bad.finish_reason is FinishReason.ERROR and "allowed_tokens" in str(bad.error)
        assert good.take_result() == expected_tokens(CONFIG, [3, 4], 4)


def test_a_callback_and_planning_that_fail_together_end_the_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(output: Any) -> None:
        raise KeyError("grammar")

    def fail(*args: object) -> None:
        raise MemoryError

    with Engine(PagedFake(CONFIG)) as engine:
        bad = engine.submit([1], sampling_params=SamplingParams(allowed_tokens=broken))  # type: ignore[arg-type]
        good = engine.submit([3, 4], sampling_params=GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler.replicas[0].planner, "plan_prefill", fail)
            with pytest.raises(MemoryError):
                engine.step()
        engine.cancel(bad)
        events = run(engine)
        assert [event.request for event in events if isinstance(event, FinishedEvent)] == [bad, good]
        assert bad.finish_reason is FinishReason.CANCELLED and not engine.has_work()


# -- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", [np.array([0.0]), np.array([1.5]), np.array([-3]), np.array([2**31]), np.array(["a"])], ids=str
)
@pytest.mark.parametrize("vocab", [True, False], ids=["vocab", "no vocab"])
def test_tokens_that_are_none_quarantine(tokens: np.ndarray, vocab: bool) -> None:
    class Broken:
        if vocab:
            config = CONFIG

        def forward(self, plan: BatchPlan) -> ForwardOutput:
            return ForwardOutput(tokens, np.array([0, 1]))

    engine = Engine(Broken())
    request = engine.submit([1, 2, 3], sampling_params=GREEDY)
    with pytest.raises(EngineFailed, match="token_ids"):
        engine.step()
    assert request.finish_reason is FinishReason.ERROR


def test_closing_closes_the_recording_even_if_the_runner_fails(tmp_path: Any) -> None:
    runner = OverlapFake(CONFIG)
    engine = Engine(runner, record=tmp_path / "run.plans")
    recorder = engine._binding._recorder
    request = engine.submit([1, 2], sampling_params=GREEDY)
    engine.step()
    runner.fail["collect"] = OSError("boom")
    with pytest.raises(EngineFailed, match="boom"):
        engine.close()
    assert recorder is not None and recorder._file.closed
    assert request.finish_reason is FinishReason.CANCELLED
    engine.close()


# -- prompt logprobs ------------------------------------------------------------------------------------------------


class Scored(OverlapFake):
    """Prompt logprobs that name the position and token they belong to, and poison where nobody may look."""

    def _execute(self, plan: BatchPlan) -> ForwardOutput:
        output = super()._execute(plan)
        known = np.append(plan.token_ids[1 : plan.num_tokens], -1)
        for row in range(plan.num_sequences):
            known[plan.query_indptr[row + 1] - 1] = plan.next_token[row]
        asked = np.zeros(plan.num_tokens, np.bool_)
        for row in range(plan.num_sequences):
            if plan.row_flags[row] & RowFlag.PROMPT_LOGPROBS:
                asked[plan.query_indptr[row] : plan.query_indptr[row + 1]] = True
        scores = np.where(asked, -(plan.positions[: plan.num_tokens] * 1000.0 + known), np.nan).astype(np.float32)
        width = plan.top_logprobs
        top = np.repeat(known[:, None], width, 1) + np.arange(width)
        return ForwardOutput(
            output.token_ids,
            output.token_indptr,
            prompt_logprobs=scores,
            prompt_top_ids=top.astype(np.int32),
            prompt_top_logprobs=np.repeat(scores[:, None], width, 1),
        )


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, 40])
def test_prompt_logprobs_are_whole_whatever_happens_on_the_way(length: int, overlap: bool) -> None:
    """Chunked, with a cached prefix, beside others, and retracted before and after the prompt is done."""
    config = fake_config((history_group(), window_group(6)), max_plan_tokens=8, max_sequences=3)
    with Engine(Scored(config), overlap=overlap, prefix_cache=True, context_length=64, cache_pages=64) as engine:
        prompt = [(3 * i) % VOCAB for i in range(length)]
        first = engine.submit(prompt, sampling_params=GREEDY)
        run(engine)
        asking = [
            engine.submit(
                prompt, sampling_params=SamplingParams(max_output_tokens=4, temperature=0, prompt_logprobs=width)
            )
            for width in (0, 2)
        ]
        engine.submit(prompt[::-1], sampling_params=GREEDY)
        for step in range(400):
            if not engine.has_work():
                break
            engine.step()
            scheduler = engine.scheduler
            idle = [request for request in asking if request.slot >= 0 and not request.is_finished]
            idle = [request for request in idle if not scheduler.replicas[0].table.in_flight[request.slot]]
            if step % 3 == 1 and idle and step < 12:
                scheduler.replicas[0].retract(idle[0])
            scheduler.check_integrity()
        for width, request in zip((0, 2), asking, strict=True):
            assert request.take_result() == first.take_result()
            columns = request.prompt_logprobs
            assert columns is not None and columns.logprobs.dtype == np.float32
            want = [-(1000.0 * i + prompt[i + 1]) for i in range(length - 1)]
            assert columns.logprobs.tolist() == want
            assert columns.top_ids.shape == columns.top_logprobs.shape == (length - 1, width)
            if width:
                assert columns.top_ids[:, 1].tolist() == [token + 1 for token in prompt[1:]]
                assert columns.top_logprobs[:, 0].tolist() == want
        assert first.prompt_logprobs is None


@pytest.mark.parametrize("missing", ["prompt_logprobs", "prompt_top_ids"])
def test_a_runner_that_forgets_prompt_logprobs_quarantines(missing: str) -> None:
    class Forgetful(Scored):
        def _execute(self, plan: BatchPlan) -> ForwardOutput:
            output = super()._execute(plan)
            kept = {} if missing == "prompt_logprobs" else {"prompt_logprobs": output.prompt_logprobs}
            return ForwardOutput(output.token_ids, output.token_indptr, **kept)

    engine = Engine(Forgetful(CONFIG), overlap=False)
    engine.submit([1, 2, 3], sampling_params=SamplingParams(prompt_logprobs=2))
    with pytest.raises(EngineFailed, match=missing):
        engine.step()


# -- masses ---------------------------------------------------------------------------------------------------------


@RUNNERS
def test_thousands_of_submissions_and_cancellations(runner_class: type[PagedFake]) -> None:
    with Engine(runner_class(CONFIG), prefix_cache=True, context_length=64) as engine:
        sent: list[Request] = []
        for round_ in range(30):
            sent += [
                engine.submit([round_ % 5, i % 7, 3] * 3, sampling_params=GREEDY, priority=i % 3, deadline_s=1e6)
                for i in range(100)
            ]
            for request in sent[-100::2] if round_ % 2 else sent[-90:]:
                engine.cancel(request)
            engine.step()
        assert len(engine.scheduler.queue) == sum(not request.is_finished and request.slot < 0 for request in sent)
        events = run(engine)
        ended = [event.request for event in events if isinstance(event, FinishedEvent)]
        assert len(set(ended)) == len(ended)
        assert all(request.finish_reason is not None for request in sent)
        engine.scheduler.check_integrity()
        assert engine.scheduler.replicas[0].cache.pool.leased == 0 and engine.scheduler.replicas[0].table.free == 4


def test_what_was_cancelled_or_ended_does_not_pile_up() -> None:
    """A blocked queue, long deadlines and many ends: nothing keeps requests that are over."""
    with Engine(PagedFake(CONFIG)) as engine:
        hold = [engine.submit([1], sampling_params=SamplingParams(max_output_tokens=10**6)) for _ in range(4)]
        engine.step()
        for _ in range(2000):
            engine.cancel(engine.submit([2, 3], sampling_params=GREEDY, deadline_s=1e6))
            engine.drain_events()
        assert len(engine.scheduler.queue) == 0
        assert len(engine.scheduler.queue._lanes[None]) < 200 and len(engine._outcomes._deadlines) < 200
        for request in hold:
            engine.cancel(request)


class Cheap:
    """Costs nothing; rows get token 7."""

    def __init__(self) -> None:
        self.config = fake_config((history_group(),), max_sequences=8, max_context_tokens=64, page_tokens=16)

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        emits = plan.emits
        return ForwardOutput(np.full(int(emits.sum()), 7, np.int32), np.concatenate([[0], np.cumsum(emits)]))


def _grown_bytes(steps: int, warm_up: int) -> int:
    with Engine(Cheap(), prefix_cache=True) as engine:
        draw = np.random.default_rng(0)

        def work(count: int) -> None:
            for step in range(count):
                if len(engine.scheduler.queue) < 4:
                    prompt = draw.integers(0, VOCAB, 20)
                    prompt[:16] = step % 3
                    salt = str(step % 97) if step % 5 == 0 else ""
                    request = engine.submit(
                        prompt,
                        sampling_params=SamplingParams(max_output_tokens=int(draw.integers(1, 30))),
                        deadline_s=1e9,
                        cache_salt=salt,
                    )
                    if step % 11 == 0:
                        engine.cancel(request)
                engine.step()

        engine.scheduler.replicas[0].cache.prefixes.seen = SeenPages(
            capacity=20
        )  # the real one grows for longer than any test runs
        tracemalloc.start()
        try:
            work(warm_up)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            work(steps)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()


def test_memory_does_not_grow() -> None:
    assert _grown_bytes(steps=1200, warm_up=300) < 40_000


@pytest.mark.slow
def test_memory_does_not_grow_over_a_hundred_thousand_steps() -> None:
    assert _grown_bytes(steps=100_000, warm_up=1000) < 60_000
