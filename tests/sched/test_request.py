"""Requests: token slices over prompt and output, and results."""

from __future__ import annotations

import numpy as np
import pytest

from resin import FinishReason, Request, RequestFailed, SamplingParams


def request(prompt: int, output: int) -> Request:
    made = Request(4, np.arange(prompt, dtype=np.int32), SamplingParams(), seed=0, max_outputs=9)
    made.output_ids = [100 + i for i in range(output)]
    return made


@pytest.mark.parametrize(("prompt", "output"), [(1, 0), (5, 0), (1, 4), (5, 4)])
def test_every_slice_of_the_known_tokens(prompt: int, output: int) -> None:
    made = request(prompt, output)
    whole = [*range(prompt), *(100 + i for i in range(output))]
    assert made.num_tokens == len(whole) and made.all_ids().tolist() == whole
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            part = made.token_slice(start, stop)
            assert part.tolist() == whole[start:stop] and part.dtype == np.int32


def test_results() -> None:
    made = request(2, 3)
    with pytest.raises(RuntimeError, match="request 4"):
        made.take_result()
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.DEADLINE):
        made.finish_reason = reason
        result = made.take_result()
        result.clear()
        assert made.take_result() == [100, 101, 102], "a copy"
    made.finish_reason, made.error = FinishReason.ERROR, OSError("boom")
    with pytest.raises(RequestFailed, match="boom") as error:
        made.take_result()
    assert error.value.__cause__ is made.error


def test_reasons_are_the_words_of_the_api() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length", "cancelled", "deadline", "error"]
    assert str(FinishReason.STOP) == "stop"


def test_requests_are_told_apart_by_identity() -> None:
    first, second = request(1, 0), request(1, 0)
    assert first != second and len({first, second}) == 2
