from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from resin import SamplingParams
from resin.conformance import Check, Report, equalities, reference
from resin.conformance.generation import TOP, Trace, compare, forced
from resin.conformance.plain import score_logits
from resin.sched.request import Request


def trace(token_ids: list[int], top: list[list[float]], temperature: float = 0.0) -> Trace:
    request = Request(0, np.zeros(1, np.int32), SamplingParams(temperature=temperature), 0, 8)
    return Trace(request, token_ids, [row[0] for row in top], [np.array(row, np.float32) for row in top])


CLEAR = [[-0.1, -3.0], [-0.2, -2.0]]


def test_equal_runs_have_no_fault() -> None:
    assert compare([trace([1, 2], CLEAR)], [trace([1, 2], CLEAR)], 1e-5).fault is None


@pytest.mark.parametrize(
    ("tokens", "top", "fault"),
    [
        ([1], CLEAR[:1], "1 tokens, expected 2"),
        ([1, 3], CLEAR, "token 1: 3, expected 2"),
        ([1, 2], [CLEAR[0], [-0.2, -2.1]], "token 1: logprobs differ by 1.0e-01"),
        ([1, 2], [CLEAR[0], [np.nan, np.nan]], "token 1: logprobs differ by nan"),
    ],
)
def test_differences_are_faults(tokens: list[int], top: list[list[float]], fault: str) -> None:
    assert fault in str(compare([trace([1, 2], CLEAR)], [trace(tokens, top)], 1e-5).fault)


def test_equal_infinities_are_equal() -> None:
    rows = [[-0.1, -np.inf], [-0.2, -np.inf]]
    assert compare([trace([1, 2], rows)], [trace([1, 2], rows)], 1e-5).fault is None


def test_near_ties_may_fall_either_way_but_not_when_sampling() -> None:
    tie = [[-0.7, -0.700001], [-0.1, -3.0]]
    found = compare([trace([1, 2], tie)], [trace([4, 9], tie)], 1e-5)
    assert (found.fault, found.near_ties) == (None, 1)
    assert compare([trace([1, 2], tie, 1.0)], [trace([4, 9], tie, 1.0)], 1e-5).fault is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_check_passes_over_numbers_that_are_none(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain forward and against a reference, wherever the number stands."""
    ids = np.array([3, 1, 2])
    scored = score_logits(np.eye(3, 24, dtype=np.float32), ids)
    plain = SimpleNamespace(score=lambda _: scored, logits=lambda _: np.full((3, 24), bad))
    kit = SimpleNamespace(
        jobs=(), plain=plain, tolerance=1e-5, reference_tolerance=1e-4, engine=nullcontext, vocab_size=24
    )
    for place in range(2):
        chosen, top = np.array(scored.following), scored.top[:, :TOP]
        chosen[place] = bad
        for logprobs, rows in ((chosen, top), (scored.following, np.where(top == top[place], bad, top))):
            request = SimpleNamespace(all_ids=lambda: ids, prompt_ids=ids[:1], prompt_logprobs=None)
            served = Trace(request, [1, 2], list(logprobs), list(rows))
            monkeypatch.setattr(equalities, "generate", lambda *_, served=served: [served])
            assert not equalities.plain_forward(kit)[0]
    assert not reference.reference_logits(kit, reference={"token_ids": ids, "logits": np.eye(3, 24)})[0]


def test_forced_allows_one_token_a_step() -> None:
    allow = forced([5, 2], 8)
    assert [np.flatnonzero(allow(generated)).tolist() for generated in ([], [5])] == [[5], [2]]


def test_scores_are_log_softmax() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32) * 5
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    scored = score_logits(logits, np.array([3, 7, 1, 0]))
    np.testing.assert_allclose(scored.following, expected[[0, 1, 2], [7, 1, 0]], atol=1e-5)
    np.testing.assert_allclose(scored.top, -np.sort(-expected[:-1], axis=-1)[:, :20], atol=1e-5)


def test_report_counts_failures_and_marks_what_does_not_apply() -> None:
    report = Report("m", (Check("a", True, "x"), Check("longer", False, "y"), Check("c", None, "z")))
    assert not report.passed and str(report).endswith("1 of 3 checks failed")
    assert [line[:4] for line in str(report).splitlines()[1:4]] == ["pass", "FAIL", "-   "]
    assert Report("m", report.checks[::2]).passed
