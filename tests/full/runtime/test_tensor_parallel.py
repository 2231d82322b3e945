"""A model that is cut over devices gives the tokens and logprobs of one device, in any family and in any number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from resin import Engine
from resin.conformance.generation import TOP, Job
from resin.conformance.generation import generate as run_jobs
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan import ArenaSpec, InvalidRequest, Phase, SamplingParams, empty_plan
from resin.runtime import ModelRunner, RunnerOptions, build_runner
from resin.runtime.collectives import count_collectives
from tests.runtime.tiny_runner import tiny_options
from tests.runtime.wide_configs import WIDE_CONFIGS

PROMPT = np.random.default_rng(3).integers(3, 256, 21).tolist()
PARAMS = SamplingParams(temperature=0, logprobs=TOP, prompt_logprobs=0, max_output_tokens=12, ignore_stop=True)
ROWS = 8


def build(config: Mapping[str, Any], tp: int, **changes: Any) -> ModelRunner:
    options = {"max_sequences": ROWS, "decode_sequences": (ROWS,), "prefill_tokens": (16,), "prefill_sequences": ROWS}
    return build_runner(random_checkpoint(config, seed=9), tiny_options(tp=tp, **(options | changes)))


def generate(config: Mapping[str, Any], tp: int, **changes: Any) -> tuple[list[int], np.ndarray]:
    """Twelve greedy tokens, and logprobs of the prompt's and of those tokens."""
    with Engine(build(config, tp, **changes), enable_metrics=False) as engine:
        (trace,) = run_jobs(engine, [Job(np.array(PROMPT, np.int32), PARAMS)])
    scored = trace.request.prompt_logprobs
    assert scored is not None
    return trace.token_ids, np.concatenate([scored.logprobs, *trace.top])


@cache
def alone(family: str) -> tuple[list[int], np.ndarray]:
    return generate(WIDE_CONFIGS[family], 1)


def check(family: str, tp: int, **changes: Any) -> None:
    tokens, logprobs = alone(family)
    split_tokens, split_logprobs = generate(WIDE_CONFIGS[family], tp, **changes)
    assert split_tokens == tokens
    np.testing.assert_allclose(split_logprobs, logprobs, atol=2e-4)


@pytest.mark.parametrize(("family", "tp"), [("gpt_oss", 2), ("qwen2_moe", 4), ("cohere", 8)])
def test_tokens_and_logprobs_equal_one_device(family: str, tp: int) -> None:
    check(family, tp)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("family", WIDE_CONFIGS)
def test_every_family_equals_one_device(family: str, tp: int) -> None:
    check(family, tp)


def test_rows_that_devices_cannot_share_are_sampled_by_each() -> None:
    check("llama", 4, decode_sequences=(ROWS - 2,), max_sequences=ROWS - 2, prefill_sequences=3)


def test_a_vocabulary_that_devices_cannot_share_is_copied() -> None:
    config = {**WIDE_CONFIGS["qwen3"], "vocab_size": max(PROMPT) + 1}
    assert config["vocab_size"] % 4 and generate(config, 4)[0] == generate(config, 1)[0]


@pytest.mark.parametrize(("family", "sums"), [("llama", 2), ("qwen3_moe", 2), ("cohere2", 1)])
def test_a_layer_sums_twice_and_a_step_trades_logits_once(family: str, sums: int) -> None:
    """Embedding; attention and feed-forward of each layer, at once where they lie beside each other; logits by columns
    for rows; tokens and three logprobs."""
    runner = build(WIDE_CONFIGS[family], 4)
    runner.bind(ArenaSpec(16, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    program = runner.executable(empty_plan(runner.config, runner.config.of_phase(Phase.DECODE)[0]))
    found = count_collectives(program.as_text())
    config = WIDE_CONFIGS[family]
    assert found.pop("all-reduce").calls == 1 + sums * config["num_hidden_layers"]
    exchanged = found.pop("all-to-all")
    assert (exchanged.calls, exchanged.nbytes) == (1, ROWS // 4 * config["vocab_size"] * 4)
    assert found.pop("all-gather").calls == 4 and not found


def test_sizes_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="tp=8: expected a divisor of num_attention_heads=4"):
        build_runner(random_checkpoint(TINY_CONFIGS["llama"]), tiny_options(tp=8))
    with pytest.raises(InvalidRequest, match="tp=4: expected a divisor of num_attention_heads=6"):
        build_runner(random_checkpoint(TINY_CONFIGS["granite"]), tiny_options(tp=4))
    with pytest.raises(InvalidRequest, match="tp=8: expected a divisor of num_experts=12"):
        build_runner(random_checkpoint(WIDE_CONFIGS["mixtral"] | {"num_local_experts": 12}), tiny_options(tp=8))
    with pytest.raises(InvalidRequest, match="tp=8: expected a divisor of intermediate_size=100"):
        build_runner(random_checkpoint(WIDE_CONFIGS["llama"] | {"intermediate_size": 100}), tiny_options(tp=8))
    with pytest.raises(InvalidRequest, match=f"at most the {len(jax.devices())} devices"):
        build_runner(random_checkpoint(TINY_CONFIGS["llama"]), tiny_options(tp=512))
    with pytest.raises(InvalidRequest, match="cp=2"):
        RunnerOptions(cp=2)
