"""Whole requests with special rows: the same tokens and logprobs alone and in a batch, with overlap, cached prefixes,
retraction and a row of token counts to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from resin import Engine, Request, SamplingParams, TokensEvent
from resin.runtime import ModelRunner
from tests.runtime.tiny_runner import build_tiny

VOCAB, ROWS = 256, 12


def every(step: int) -> Callable[[Sequence[int]], np.ndarray]:
    return lambda output: (np.arange(VOCAB) + len(output)) % step == 0


POLICIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 3, "repetition_penalty": 1.8, "presence_penalty": 0.5},
    {"seed": 4, "allowed_tokens": every(3), "logprobs": 2},
    {"temperature": 0, "frequency_penalty": 1.5, "logprobs": 1},
    {"seed": 5, "top_k": 20, "logit_bias": {7: 3.0, 9: -float("inf")}},
    {"seed": 6, "top_p": 0.9},
    {"temperature": 0, "allowed_tokens": every(5), "repetition_penalty": 1.3, "logit_bias": {20: 2.0}},
    {"seed": 7, "stop_token_ids": tuple(range(0, 240, 16)), "min_output_tokens": 6, "prompt_logprobs": 1},
]
PROMPTS = [[(5 + 11 * number + 7 * place) % VOCAB for place in range(18 + number % 3)] for number in range(ROWS)]
PARAMS = [SamplingParams(max_output_tokens=40, **POLICIES[number % len(POLICIES)]) for number in range(ROWS)]


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    yield build_tiny(
        max_sequences=ROWS, max_penalised=2, decode_sequences=(1, ROWS), prefill_tokens=(32,), prefill_sequences=4
    )


def run(runner: ModelRunner, numbers: Sequence[int], **settings: Any) -> tuple[list[list[int]], list[Any], Engine]:
    """Tokens and logprobs of these requests, sent at once, and the engine that they ran in."""
    engine = Engine(runner.view(), **{"cache_pages": 200, "prefix_cache": False} | settings)
    with engine:
        sent = [engine.submit(PROMPTS[number], sampling_params=PARAMS[number]) for number in numbers]
        scores: dict[Request, list[Any]] = {request: [] for request in sent}
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    for row in event:
                        scores[row.request].append((row.logprobs, row.top_logprobs))
            engine.scheduler.check_integrity()
    return [request.take_result() for request in sent], list(scores.values()), engine


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[tuple[list[int], Any]]:
    ran = [run(runner, [number], overlap=0) for number in range(ROWS)]
    return [(tokens[0], scores[0]) for tokens, scores, _ in ran]


@pytest.mark.parametrize("settings", [{"overlap": 0}, {"overlap": 1}, {"overlap": 2}, {"cache_pages": 18}], ids=str)
def test_together_as_alone(runner: ModelRunner, alone: list[tuple[list[int], Any]], settings: dict[str, int]) -> None:
    tokens, scores, engine = run(runner, range(ROWS), **settings)
    assert tokens == [each for each, _ in alone]
    assert bool(engine.scheduler.replicas[0].retractions) == ("cache_pages" in settings)
    for number, (mine, (_, wanted)) in enumerate(zip(scores, alone, strict=True)):
        for (chosen, top), (other, other_top) in zip(mine, wanted, strict=True):
            assert (chosen is None) == (PARAMS[number].logprobs is None)
            if chosen is not None:  # products of one row round otherwise than those of many
                np.testing.assert_allclose(chosen, other, atol=1e-4)
                np.testing.assert_allclose(top, other_top, atol=1e-4)


def test_with_a_cached_prefix(runner: ModelRunner, alone: list[tuple[list[int], Any]]) -> None:
    with Engine(runner.view(), cache_pages=200, prefix_cache=True) as engine:
        for _ in range(2):
            sent = [
                engine.submit(prompt, sampling_params=params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
            while engine.has_work():
                engine.step()
            assert [request.take_result() for request in sent] == [tokens for tokens, _ in alone]
        assert sum(request.prefix_hit_tokens for request in sent) > 100
