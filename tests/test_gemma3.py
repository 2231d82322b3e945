"""Gemma 3 270M with its real weights, in float32: the tokens and likelihoods of transformers, past its window.

Runs where the weights are: `resin download gemma3-270m` fetches them, under terms of their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from resin import ArenaSpec, Engine, SamplingParams
from resin.conformance.generation import Job, Trace, forced, generate
from resin.conformance.plain import PlainForward
from resin.models.loading import open_checkpoint_path
from resin.models.registry import MODELS
from resin.runtime import ModelRunner, RunnerOptions, build_runner

GOLDEN = json.loads((Path(__file__).parent / "data" / "gemma3_golden.json").read_text())["prompts"]
LONG = GOLDEN[-1]  # 721 tokens: past the window of 512
NUM_PAGES = 400
CLEAR_GAP = 1e-3  # nats between the best two tokens, below which either may win

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    path = MODELS["gemma3-270m"].source.find()
    if path is None:
        pytest.skip("gemma3-270m is not downloaded")
    options = RunnerOptions(
        max_sequences=6, max_context_tokens=832, decode_sequences=(6,), prefill_tokens=(256,), prefill_sequences=6
    )
    checkpoint = open_checkpoint_path(path)
    runner = build_runner(checkpoint, options)
    checkpoint.close()
    runner.bind(ArenaSpec(NUM_PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    runner.warm_up()
    return runner


def job(prompt: dict, *, lead: bool = False) -> Job:
    """Greedy to the golden's length; `lead` keeps to the golden tokens whatever the model prefers."""
    ids = prompt["generated_ids"]
    params = SamplingParams(
        max_output_tokens=len(ids),
        temperature=0,
        logprobs=1,
        prompt_logprobs=0,
        allowed_tokens=forced(ids, 262_144) if lead else None,
    )
    return Job(np.asarray(prompt["prompt_ids"], np.int32), params)


def run(runner: ModelRunner, jobs: list[Job], **options: object) -> list[Trace]:
    with Engine(runner.view(), enable_metrics=False, **options) as engine:  # type: ignore[arg-type]
        return generate(engine, jobs)


def test_tokens_and_likelihoods_are_those_of_transformers(runner: ModelRunner) -> None:
    led = run(runner, [job(prompt, lead=True) for prompt in GOLDEN])
    for prompt, trace in zip(GOLDEN, led, strict=True):
        assert np.abs(np.array(trace.logprobs) - prompt["chosen_logprobs"]).max() < 1e-3
        # Where the golden token is the best by a clear gap, its logprob is our largest as well.
        clear = np.array(prompt["top2_gaps"]) > CLEAR_GAP
        best = np.array([top[0] for top in trace.top])
        np.testing.assert_array_equal(best[clear], np.array(trace.logprobs, np.float32)[clear])
    held = led[-1].request.prompt_logprobs
    assert held is not None
    assert abs(-held.logprobs.astype(np.float64).mean() - LONG["prompt_nll_mean"]) < 1e-4


def test_greedy_tokens_batched_and_overlapped(runner: ModelRunner) -> None:
    assert min(min(prompt["top2_gaps"]) for prompt in GOLDEN) > CLEAR_GAP
    traces = run(runner, [job(prompt) for prompt in GOLDEN])
    assert [trace.token_ids for trace in traces] == [prompt["generated_ids"] for prompt in GOLDEN]


def test_plain_forward_scores_what_the_engine_serves(runner: ModelRunner) -> None:
    trace = run(runner, [job(LONG)])[0]
    plain = PlainForward(runner.model, runner.weights, runner.config.groups, 832)
    scored = plain.score(trace.request.all_ids())
    held = trace.request.prompt_logprobs
    assert held is not None
    served = np.concatenate([held.logprobs, trace.logprobs])
    assert np.abs(served - scored.following).max() < 1e-5 * max(1.0, scored.deviation)


def test_prefix_hit_past_the_window_equals_the_cold_run(runner: ModelRunner) -> None:
    params = SamplingParams(max_output_tokens=len(LONG["generated_ids"]), temperature=0, logprobs=1)
    again = Job(np.asarray(LONG["prompt_ids"], np.int32), params)
    with Engine(runner.view(), prefix_cache=True, enable_metrics=False) as engine:
        cold, warm = generate(engine, [again, again], alone=True)
    align = runner.config.geometry.align_tokens
    assert cold.request.prefix_hit_tokens == 0
    assert warm.request.prefix_hit_tokens == (len(LONG["prompt_ids"]) - 1) // align * align > 512
    assert cold.token_ids == warm.token_ids == LONG["generated_ids"]
