"""Events: columns that iterate as rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from resin import Engine, FinishedEvent, FinishReason, Request, SamplingParams, TokenRow, TokensEvent
from tests.fakes import OverlapFake, fake_config, history_group


def request(number: int, logprobs: int | None = None) -> Request:
    return Request(number, np.zeros(1, np.int32), SamplingParams(logprobs=logprobs), seed=0, max_outputs=1)


def event(*requests: Request, top: int = 3, scored: bool = True) -> TokensEvent:
    """Requests with 1, 2, 3, … tokens each."""
    indptr = np.cumsum([0, *range(1, len(requests) + 1)])
    count = int(indptr[-1])
    return TokensEvent(
        requests,
        np.arange(count, dtype=np.int32),
        indptr,
        np.arange(count, dtype=np.float32) if scored else None,
        np.arange(count * top, dtype=np.int32).reshape(count, top) if scored and top else None,
        np.arange(count * top, dtype=np.float32).reshape(count, top) if scored and top else None,
    )


def test_each_request_owns_its_tokens() -> None:
    requests = [request(i) for i in range(3)]
    rows = list(event(*requests))
    assert [row.request for row in rows] == requests
    assert [row.token_ids.tolist() for row in rows] == [[0], [1, 2], [3, 4, 5]]
    assert all(row.logprobs is row.top_ids is row.top_logprobs is None for row in rows), "nobody asked"
    assert all(isinstance(row, TokenRow) for row in rows)


def test_each_request_gets_the_logprobs_that_it_asked_for() -> None:
    rows = list(event(request(0), request(1, 0), request(2, 2), request(3, 3)))
    assert rows[0].logprobs is None
    assert rows[1].logprobs is not None and rows[1].logprobs.tolist() == [1, 2] and rows[1].top_ids is None
    assert rows[2].top_ids is not None and rows[2].top_ids.tolist() == [[9, 10], [12, 13], [15, 16]]
    assert rows[2].top_logprobs is not None and rows[2].top_logprobs.dtype == np.float32
    assert rows[3].top_ids is not None and rows[3].top_ids.shape == (4, 3)


def test_a_runner_without_logprobs_leaves_them_out() -> None:
    assert all(row.logprobs is None for row in event(request(0, 2), scored=False))
    row = next(iter(event(request(0, 2), top=0)))
    assert row.logprobs is not None and row.top_ids is row.top_logprobs is None


def test_events_say_what_they_are_and_never_change() -> None:
    made = event(request(5), request(8))
    assert repr(made) == "TokensEvent(5: [0], 8: [1, 2])"
    ended = FinishedEvent(request(7), FinishReason.DEADLINE)
    assert repr(ended) == "FinishedEvent(7, deadline)"
    for each, name in ((made, "token_ids"), (ended, "reason")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(each, name, None)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_events_of_a_run_are_its_tokens_in_order(overlap: bool) -> None:
    config = fake_config((history_group(),), max_plan_tokens=16)
    with Engine(OverlapFake(config), overlap=overlap) as engine:
        sent = [
            engine.submit([i, 2] * (i + 1), sampling_params=SamplingParams(max_output_tokens=3 + i)) for i in range(8)
        ]
        told: dict[Request, list[int]] = {each: [] for each in sent}
        kept: list[tuple[TokensEvent, list[int]]] = []
        ended: set[Request] = set()
        while engine.has_work():
            events = engine.step()
            assert sum(isinstance(each, TokensEvent) for each in events) <= 1, "one a step, in columns"
            for each in events:
                if isinstance(each, FinishedEvent):
                    assert each.request not in ended and each.reason is each.request.finish_reason
                    ended.add(each.request)
                    continue
                assert not ended & set(each.requests)
                assert each.token_ids.dtype == np.int32
                assert each.token_indptr.tolist() == list(range(len(each.requests) + 1))
                kept.append((each, each.token_ids.tolist()))
                for row in each:
                    told[row.request] += row.token_ids.tolist()
    assert told == {each: each.take_result() for each in sent} and ended == set(sent)
    assert all(each.token_ids.tolist() == tokens for each, tokens in kept), "later steps leave earlier events alone"
