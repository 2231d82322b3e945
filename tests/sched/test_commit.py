"""Commit: what an output must look like, which rows count, and who ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from resin import (
    BatchPlan,
    Engine,
    FinishedEvent,
    FinishReason,
    ForwardOutput,
    Request,
    RowFault,
    SamplingParams,
    TokensEvent,
)
from resin.plan import build_plan, plan_layout, smallest_bucket
from resin.plan.buckets import Phase
from resin.plan.layout import HEADER
from resin.sched.outputs import BadOutput, NoToken, check_output
from tests.fakes import OverlapFake, PagedFake, expected_tokens, fake_config, history_group, state_group

CONFIG = fake_config((history_group(),))


def plan_of(sequences: int) -> BatchPlan:
    config = fake_config(())
    bucket = smallest_bucket((), Phase.DECODE, sequences, sequences, ())
    assert bucket is not None
    layout = plan_layout(bucket, config.groups, config.geometry)
    buffer = np.zeros(layout.words, np.int32)
    buffer[HEADER.num_sequences] = buffer[HEADER.num_tokens] = sequences
    return build_plan(config, bucket, buffer, step=0)


def check(tokens: Any, indptr: Any, emits: list[bool] | None = None, vocab_size: int = 100) -> tuple[list[int], ...]:
    marks = None if emits is None else np.array(emits)
    sequences = len(emits) if emits is not None else len(indptr) - 1
    chosen, rows, _ = check_output(plan_of(sequences), ForwardOutput(tokens, indptr), marks, vocab_size)
    assert chosen.dtype == np.int32 and rows.dtype == np.int64
    return chosen.tolist(), rows.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_tokens_of_every_integer_type(dtype: Any) -> None:
    assert check(np.array([7, 9], dtype), np.array([0, 1, 2], dtype)) == ([7, 9], [0, 1])
    assert check([7, 9], [0, 1, 2]) == ([7, 9], [0, 1]), "plain lists as well"


def test_rows_that_emit_nothing_may_hold_anything() -> None:
    assert check([7, 5], [0, 1, 1, 2], [True, False, True]) == ([7, 5], [0, 1])
    assert check([7, 99, 98, 5], [0, 1, 3, 4], [True, False, True]) == ([7, 5], [0, 3])
    assert check([], [0, 0], [False]) == ([], [])
    assert check([7, 1000, 5], [0, 1, 2, 3], [True, False, True]) == ([7, 5], [0, 2]), "nobody looks at that token"


@pytest.mark.parametrize(
    ("tokens", "indptr", "emits"),
    [
        ([1, 2], [0, 1], None),
        ([1, 2], [0, 2], None),
        ([1], [0, 1, 1], None),
        ([1], [0, 0, 1], None),
        ([1, 2, 3], [0, 1, 3], [True, True]),
        ([1, 2], [0, 2, 2], [True, True]),
        ([1], [0, 1, 1], [True, True]),
        ([1, 2], [1, 1, 2], [False, True]),
        ([1, 2, 3], [0, 1, 2], [True, True]),
        ([1, 2], [0, 3, 2], [False, True]),
        ([1, 2], [0, -1, 2], [False, False]),
        ([[1], [2]], [0, 1, 2], None),
        ([1, 2], [[0, 1, 2]], None),
        ([1, -3], [0, 1, 2], None),
        ([1, 100], [0, 1, 2], None),
        ([1.0, 2.0], [0, 1, 2], None),
        (["a", "b"], [0, 1, 2], None),
    ],
    ids=str,
)
def test_outputs_that_do_not_fit(tokens: Any, indptr: Any, emits: list[bool] | None) -> None:
    plan = plan_of(2)
    marks = None if emits is None else np.array(emits)
    with pytest.raises(BadOutput, match="token_i"):
        check_output(plan, ForwardOutput(np.array(tokens), np.array(indptr)), marks, 100)


def test_without_a_vocabulary_ids_only_have_to_be_ids() -> None:
    assert check([2**31 - 1], [0, 1], vocab_size=0) == ([2**31 - 1], [0])
    for token in (-3, 2**31):
        with pytest.raises(BadOutput, match="token_ids"):
            check(np.array([token]), [0, 1], vocab_size=0)


def test_the_end_is_a_stop_token_even_at_the_limit() -> None:
    want = expected_tokens(CONFIG, [1, 2], 5)
    ends = {}
    for name, settings in {
        "stop at the limit": {"max_output_tokens": 5, "stop_token_ids": (want[4],)},
        "limit": {"max_output_tokens": 4, "stop_token_ids": (want[4],)},
        "first of several": {"max_output_tokens": 9, "stop_token_ids": (250, want[3], want[1])},
    }.items():
        for runner_class in (PagedFake, OverlapFake):
            with Engine(runner_class(CONFIG)) as engine:
                request = engine.submit([1, 2], sampling_params=SamplingParams(temperature=0, **settings))  # type: ignore[arg-type]
                while engine.has_work():
                    engine.step()
                assert ends.setdefault(name, (request.finish_reason, request.output_ids)) == (
                    request.finish_reason,
                    request.output_ids,
                )
    assert ends == {
        "stop at the limit": (FinishReason.STOP, want[:5]),
        "limit": (FinishReason.LENGTH, want[:4]),
        "first of several": (FinishReason.STOP, want[:2]),
    }


def test_rows_with_stop_lists_of_every_length_in_one_plan() -> None:
    """The narrowest comparison that serves all rows must serve each."""
    prompts = [[i, 2 * i + 1] for i in range(1, 5)]
    config = fake_config((history_group(),), max_sequences=5)
    want = [expected_tokens(config, prompt, 9) for prompt in prompts]
    stops: list[tuple[int, ...]] = [(), (want[1][3],), (*range(200, 215), want[2][5]), (want[3][8], 249)]
    with Engine(OverlapFake(config)) as engine:
        sent = [
            engine.submit(
                prompt, sampling_params=SamplingParams(max_output_tokens=9, temperature=0, stop_token_ids=stop)
            )
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        while engine.has_work():
            engine.step()
    for request, tokens, stop in zip(sent, want, stops, strict=True):
        place = next((i for i, token in enumerate(tokens) if token in stop), 8)
        assert request.take_result() == tokens[: place + 1]


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
def test_rows_of_ended_requests_are_discarded_wherever_they_are(prefix_cache: bool) -> None:
    """Cancelled while a prefill, a chunk or a decode row is in flight: no token, no event, pages back once."""
    config = fake_config((history_group(), state_group(8, rows=20)), max_plan_tokens=16, max_sequences=6)
    for cancel_at in range(9):
        with Engine(OverlapFake(config), prefix_cache=prefix_cache) as engine:
            sent = [
                engine.submit([i, 3, 5] * size, sampling_params=SamplingParams(max_output_tokens=12, temperature=0))
                for i, size in enumerate((1, 2, 9, 3, 12))
            ]
            events = []
            for step in range(400):
                if not engine.has_work():
                    break
                if step == cancel_at:
                    for request in sent[::2]:
                        engine.cancel(request)
                events += engine.step()
                engine.scheduler.check_integrity()
            assert engine.scheduler.replicas[0].cache.pool.leased == 0 and not engine.scheduler.replicas[0].closing
        told: dict[int, list[int]] = {request.id: [] for request in sent}
        for event in events:
            if isinstance(event, TokensEvent):
                for row in event:
                    told[row.request.id] += row.token_ids.tolist()
            else:
                assert isinstance(event, FinishedEvent)
        for request in sent:
            want = expected_tokens(config, request.prompt_ids.tolist(), 12)
            assert told[request.id] == request.output_ids == want[: len(request.output_ids)]
            assert (request.finish_reason is FinishReason.LENGTH) == (len(request.output_ids) == 12)


def test_logprob_columns_follow_their_rows() -> None:
    """Some rows ask for logprobs, some prefill rows emit nothing, one row is discarded."""

    class Scored(OverlapFake):
        def _execute(self, plan: BatchPlan) -> ForwardOutput:
            output = super()._execute(plan)
            tokens = output.token_ids.astype(np.int64)
            width = plan.top_logprobs
            return ForwardOutput(
                output.token_ids,
                output.token_indptr,
                logprobs=-tokens.astype(np.float32),
                top_ids=np.repeat(tokens[:, None], width, 1) + np.arange(width),
                top_logprobs=np.repeat(-tokens[:, None].astype(np.float32), width, 1),
            )

    config = fake_config((history_group(),), max_plan_tokens=8, max_sequences=5)
    with Engine(Scored(config)) as engine:
        widths = (None, 0, 2, 5, None)
        sent = [
            engine.submit([i, 3] * (i + 1), sampling_params=SamplingParams(max_output_tokens=4 + i, logprobs=width))
            for i, width in enumerate(widths)
        ]
        rows = 0
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    for row in event:
                        rows += 1
                        check_row(row, widths[sent.index(row.request)])
    assert rows == sum(len(request.output_ids) for request in sent) == sum(range(4, 9))


def check_row(row: Any, width: int | None) -> None:
    token = int(row.token_ids[0])
    if width is None:
        assert row.logprobs is row.top_ids is row.top_logprobs is None
        return
    assert row.logprobs.tolist() == [-token] and row.logprobs.dtype == np.float32
    if width == 0:
        assert row.top_ids is row.top_logprobs is None
    else:
        assert row.top_ids.tolist() == [[token + i for i in range(width)]]
        assert row.top_logprobs.shape == (1, width)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_faults_are_told_from_ids_in_every_signed_dtype(dtype: type) -> None:
    faults = [int(RowFault.NO_TOKEN), 5, int(RowFault.NOT_FINITE)]
    tokens = np.array(faults, dtype)
    chosen, _, has_faults = check_output(plan_of(3), ForwardOutput(tokens, np.arange(4)), None, 100)
    assert chosen.tolist() == faults and has_faults


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("fault", list(RowFault))
@pytest.mark.parametrize("outputs", [0, 1, 3])
def test_a_row_without_a_token_ends_its_request_alone(outputs: int, fault: RowFault, overlap: int) -> None:
    runner = (OverlapFake if overlap else PagedFake)(CONFIG)
    with Engine(runner, overlap=overlap, prefix_cache=True) as engine:
        prompt = list(range(9))
        bad, good, other = (
            engine.submit(ids, sampling_params=SamplingParams(max_output_tokens=8, temperature=0))
            for ids in (prompt, prompt, [4, 5])
        )
        runner.faults[bad.id] = (len(prompt) + outputs, fault)
        told: dict[Request, list[int]] = {bad: [], good: [], other: []}
        ends = []
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, FinishedEvent):
                    ends.append(event.request)
                else:
                    for row in event:
                        told[row.request] += row.token_ids.tolist()
            engine.scheduler.check_integrity()
        want = expected_tokens(CONFIG, prompt, 8)
        assert bad.finish_reason is FinishReason.ERROR and isinstance(bad.error, NoToken)
        assert bad.output_ids == told[bad] == want[:outputs]
        assert good.take_result() == told[good] == want
        assert other.take_result() == expected_tokens(CONFIG, [4, 5], 8)
        assert sorted(request.id for request in ends) == [0, 1, 2]
