"""Allowed-token masks: bits where the tokens are, and failures that stay with their request."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from resin import InvalidRequest, Request, SamplingParams
from resin.sched.masks import allowed_masks


def request(number: int, answer: Any) -> Request:
    def callback(output: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    params = SamplingParams(allowed_tokens=None if isinstance(answer, str) else callback)
    return Request(number, np.zeros(1, np.int32), params, seed=0, max_outputs=1)


def bits(row: np.ndarray, vocab_size: int) -> list[int]:
    return [token for token in range(vocab_size) if row[token // 32] >> (token % 32) & 1]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100])
def test_bit_t_of_the_set_is_token_t(vocab_size: int) -> None:
    draw = np.random.default_rng(vocab_size)
    allowed = draw.random(vocab_size) < 0.5
    allowed[0] = True
    masks = allowed_masks([request(0, allowed)], vocab_size, deque())
    assert masks is not None and masks.dtype == np.int32 and masks.shape == (1, -(-vocab_size // 32))
    assert bits(masks[0], vocab_size) == np.flatnonzero(allowed).tolist()


def test_only_constrained_rows_have_a_set() -> None:
    allowed = np.zeros(40, np.bool_)
    allowed[[3, 39]] = True
    rows = [request(0, "free"), request(1, allowed), request(3, "free"), request(2, None)]
    masks = allowed_masks(rows, 40, deque())
    assert masks is not None and masks.shape == (2, 2) and not masks.flags.writeable
    assert bits(masks[0], 40) == [3, 39]
    assert bits(masks[1], 40) == list(range(40)), "its callback allows everything"


def test_no_mask_without_a_constrained_row() -> None:
    assert allowed_masks([request(0, "free")], 40, deque()) is None
    assert allowed_masks([], 40, deque()) is None


def test_a_ready_bit_set_is_copied() -> None:
    ready = np.array([5, 1], np.int32)
    masks = allowed_masks([request(0, ready)], 40, deque())
    ready[0] = -1
    assert masks is not None and bits(masks[0], 40) == [0, 2, 32]


def test_failures_are_reported_and_their_rows_allow_everything() -> None:
    failures: deque[tuple[Request, Exception]] = deque()
    fault = KeyError("grammar")
    rows = [request(0, fault), request(1, np.ones(39, np.bool_)), request(2, np.ones(40, np.bool_))]
    masks = allowed_masks(rows, 40, failures)
    assert masks is not None and bits(masks[0], 40) == bits(masks[1], 40) == list(range(40))
    assert [failed for failed, _ in failures] == rows[:2]
    assert failures[0][1] is fault and isinstance(failures[1][1], InvalidRequest)


@pytest.mark.parametrize(
    "answer",
    [
        np.zeros(40, np.bool_),
        np.zeros(2, np.int32),
        np.array([0, 1 << 20], np.int32),  # a bit beyond the vocabulary
        np.ones(2, np.uint32),
        np.ones((1, 40), np.bool_),
        np.ones(40, np.float32),
        [True] * 39,
    ],
    ids=["none", "no bit", "beyond", "unsigned", "two axes", "floats", "short"],
)
def test_masks_that_make_no_sense(answer: Any) -> None:
    failures: deque[tuple[Request, Exception]] = deque()
    allowed_masks([request(0, answer)], 40, failures)
    assert len(failures) == 1 and isinstance(failures[0][1], InvalidRequest)


def test_an_interrupt_is_nobodys_failure() -> None:
    def interrupted(output: Any) -> None:
        raise KeyboardInterrupt

    row = Request(0, np.zeros(1, np.int32), SamplingParams(allowed_tokens=interrupted), seed=0, max_outputs=1)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        allowed_masks([row], 40, deque())
