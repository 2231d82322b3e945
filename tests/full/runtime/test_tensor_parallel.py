from __future__ import annotations

import jax
import numpy as np
import pytest

from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan import ArenaSpec, InvalidRequest, SamplingParams
from resin.runtime import RunnerOptions, build_runner
from tests.plan_builder import PlanBuilder
from tests.runtime.tiny_runner import tiny_options

PROMPT = np.random.default_rng(3).integers(3, 256, 21).tolist()
PARAMS = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=0)


def generate(config: dict[str, object], tp: int) -> tuple[list[int], np.ndarray]:
    """Twelve greedy tokens and every logprob on the way."""
    options = tiny_options(tp=tp, decode_sequences=(2,), prefill_tokens=(16,), prefill_sequences=2)
    runner = build_runner(random_checkpoint(config, seed=9), options)
    pages = 16
    runner.bind(ArenaSpec(pages, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    runner.warm_up()
    builder = PlanBuilder(runner.config, pages)
    sequence = builder.sequence(0, PROMPT, PARAMS)
    first = runner.forward(builder.prefill([(sequence, 13)]))
    outputs = [runner.forward(builder.prefill([(sequence, 8)]))]
    sequence.tokens += outputs[0].token_ids.tolist()
    for _ in range(11):
        outputs.append(runner.forward(builder.decode([sequence])))
        sequence.tokens += outputs[-1].token_ids.tolist()
    logprobs = [first.prompt_logprobs, *(output.top_logprobs[0] for output in outputs)]
    return sequence.tokens[len(PROMPT) :], np.concatenate(logprobs)


def config_of(kv_heads: int, tied: bool = True) -> dict[str, object]:
    return {
        **TINY_CONFIGS["llama"],
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


@pytest.mark.parametrize(
    ("kv_heads", "tied", "sizes"),
    [(8, True, (2,)), (2, False, (4,)), pytest.param(8, True, (4, 8), marks=pytest.mark.slow)],
)
def test_tokens_and_logprobs_equal_one_device(kv_heads: int, tied: bool, sizes: tuple[int, ...]) -> None:
    tokens, logprobs = generate(config_of(kv_heads, tied), 1)
    for tp in sizes:
        split_tokens, split_logprobs = generate(config_of(kv_heads, tied), tp)
        assert split_tokens == tokens
        np.testing.assert_allclose(split_logprobs, logprobs, atol=1e-4)


def test_sizes_that_do_not_divide_the_model_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="num_attention_heads=4"):
        build_runner(random_checkpoint(TINY_CONFIGS["llama"]), tiny_options(tp=8))
    with pytest.raises(InvalidRequest, match=f"at most the {len(jax.devices())} devices"):
        build_runner(random_checkpoint(TINY_CONFIGS["llama"]), tiny_options(tp=512))
    with pytest.raises(InvalidRequest, match="dp=2"):
        RunnerOptions(dp=2)
