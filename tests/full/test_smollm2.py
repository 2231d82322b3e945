"""A real model, end to end, in float32: the tokens of transformers, whatever the engine does on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin import ArenaSpec, Engine, Policy, Request, SamplingParams, TokensEvent
from resin.models.families import sequence_logits
from resin.runtime import ModelRunner, RunnerOptions, load_runner

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())["prompts"]
STOP = 2
NUM_PAGES = 128
SHORT_TOKENS = 14
SHORT = SamplingParams(max_output_tokens=SHORT_TOKENS, temperature=0, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    options = RunnerOptions(
        max_sequences=6,
        max_context_tokens=1024,
        decode_sequences=(6,),
        prefill_tokens=(16, 256),
        prefill_sequences=6,
    )
    runner = load_runner("smollm2-135m", options)
    runner.bind(ArenaSpec(NUM_PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    runner.warm_up()
    return runner


class Bound:
    """The warm runner for one more engine: its arena is bound already, and may be larger than the engine's pool."""

    def __init__(self, runner: ModelRunner) -> None:
        self.config = runner.config
        self.forward, self.dispatch, self.collect = runner.forward, runner.dispatch, runner.collect


def engine_on(runner: ModelRunner, pages: int = NUM_PAGES, **settings: Any) -> Engine:
    return Engine(Bound(runner), cache_pages=pages, **settings)


def run(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    while not all(request.is_finished for request in requests):
        engine.step()
    return [request.take_result() for request in requests]


def submit_all(engine: Engine, params: SamplingParams = SHORT) -> list[Request]:
    return [engine.submit(prompt["prompt_ids"], sampling_params=params) for prompt in GOLDEN]


def golden_tokens(limit: int = SHORT_TOKENS) -> list[list[int]]:
    return [prompt["generated_ids"][:limit] for prompt in GOLDEN]


def test_alone_tokens_and_logprobs_are_those_of_transformers(runner: ModelRunner) -> None:
    params = SamplingParams(max_output_tokens=48, temperature=0, stop_token_ids=(STOP,), logprobs=5)
    with engine_on(runner) as engine:
        for prompt in GOLDEN:
            request = engine.submit(prompt["prompt_ids"], sampling_params=params)
            rows = []
            while not request.is_finished:
                rows += [row for event in engine.step() if isinstance(event, TokensEvent) for row in event]
            assert request.take_result() == prompt["generated_ids"], prompt["name"]
            chosen = np.concatenate([row.logprobs for row in rows if row.logprobs is not None])
            assert np.abs(chosen - prompt["chosen_logprobs"]).max() <= 2e-4
            for row, golden in zip(rows, prompt["top_logprobs"], strict=False):
                assert row.top_ids is not None and row.top_logprobs is not None
                assert row.top_ids[0].tolist() == [token for token, _ in golden]
                assert np.abs(row.top_logprobs[0] - [logprob for _, logprob in golden]).max() <= 2e-4


def test_the_long_prompts_likelihood(runner: ModelRunner) -> None:
    prompt = GOLDEN[-1]
    params = SamplingParams(max_output_tokens=1, temperature=0, prompt_logprobs=0)
    with engine_on(runner) as engine:
        request = engine.submit(prompt["prompt_ids"], sampling_params=params)
        run(engine, [request])
    assert request.prompt_logprobs is not None
    assert abs(-request.prompt_logprobs.logprobs.mean() - prompt["prompt_nll_mean"]) < 1e-4
    ids = np.asarray(prompt["prompt_ids"])
    merge = runner._spec.model.merge
    with jax.default_matmul_precision("highest"):
        forward = jax.jit(lambda weights, tokens: sequence_logits(merge(weights), tokens))
        logits = forward(runner._weights, jnp.asarray(ids, jnp.int32))
    plain = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1), ids[1:]]
    assert abs(-plain.mean() - prompt["prompt_nll_mean"]) < 1e-4
    assert np.abs(plain - request.prompt_logprobs.logprobs).max() < 2e-4


@pytest.mark.parametrize(
    ("overlap", "budget"),
    [
        pytest.param(2, 256, id="overlapped-whole"),
        pytest.param(0, 16, id="synchronous-chunked"),
        pytest.param(0, 256, id="synchronous-whole", marks=pytest.mark.slow),
        pytest.param(1, 16, id="overlapped-chunked", marks=pytest.mark.slow),
    ],
)
def test_batched(runner: ModelRunner, overlap: int, budget: int) -> None:
    with engine_on(runner, overlap=overlap, policy=Policy(max_plan_tokens=budget)) as engine:
        assert run(engine, submit_all(engine)) == golden_tokens()


def test_retracted(runner: ModelRunner) -> None:
    with engine_on(runner, pages=1 + 64, context_length=1024) as engine:
        crowd = [
            engine.submit(prompt["prompt_ids"], sampling_params=SHORT)
            for prompt in [*GOLDEN[:5], *GOLDEN[1:5], *GOLDEN[1:5], *GOLDEN[1:5]]
        ]
        long = engine.submit(GOLDEN[-1]["prompt_ids"], sampling_params=SHORT, priority=100)
        run(engine, [long, *crowd])
        assert long.take_result() == golden_tokens()[-1]
        want = golden_tokens()
        assert [request.take_result() for request in crowd] == [*want[:5], *want[1:5], *want[1:5], *want[1:5]]
        assert engine.scheduler.replicas[0].retractions > 0


def test_prefix_hits_equal_cold_runs(runner: ModelRunner) -> None:
    with engine_on(runner, prefix_cache=True) as engine:
        cold = run(engine, submit_all(engine))
        again = submit_all(engine)
        warm = run(engine, again)
        assert cold == warm == golden_tokens()
        assert [request.prefix_hit_tokens for request in again] == [
            (len(prompt["prompt_ids"]) - 1) // 16 * 16 for prompt in GOLDEN
        ]
        turn = GOLDEN[1]["prompt_ids"] + golden_tokens()[1] + [198]
        reused = engine.submit(turn, sampling_params=SHORT)
        fresh = engine.submit(turn, sampling_params=SHORT, cache_salt="alone")
        run(engine, [reused, fresh])
        assert reused.take_result() == fresh.take_result()
        assert fresh.prefix_hit_tokens == 0 and reused.prefix_hit_tokens >= len(GOLDEN[1]["prompt_ids"])


def test_seeded_sampling_does_not_depend_on_the_batch(runner: ModelRunner) -> None:
    params = SamplingParams(max_output_tokens=12, temperature=0.9, top_p=0.95, top_k=50, seed=1234)
    others = SamplingParams(max_output_tokens=15, temperature=1.5, seed=99)
    results = []
    for crowd, settings in ((0, {}), (5, {}), (3, {"overlap": False}), (2, {"policy": Policy(max_plan_tokens=16)})):
        with engine_on(runner, prefix_cache=crowd == 5, **settings) as engine:
            for prompt in GOLDEN[:crowd]:
                engine.submit(prompt["prompt_ids"], sampling_params=others)
            request = engine.submit(GOLDEN[1]["prompt_ids"], sampling_params=params)
            results.append(run(engine, [request])[0])
    assert results == results[:1] * 4
    assert results[0] != golden_tokens(12)[1], "a draw, not the most likely tokens"


def test_nothing_compiled_after_warm_up(runner: ModelRunner) -> None:
    assert runner.observations()["compilations_after_ready"] == 0
