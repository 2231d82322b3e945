"""Keys and values in 8 bits, from the option to the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from resin.conformance import Settings
from resin.conformance.equalities import EQUALITIES
from resin.conformance.kit import ConformanceKit
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan import InvalidRequest, SamplingParams
from resin.plan.cache import FP8_DTYPE
from resin.runtime import RunnerOptions, build_runner
from resin.runtime.ledger import program_temporary_bytes
from tests.runtime.tiny_runner import NUM_PAGES, build_tiny, builder_for, tiny_checkpoint, tiny_options

PROMPTS = [np.random.default_rng(n).integers(3, 256, n).tolist() for n in (5, 17, 30)]


def logprobs(**changes: object) -> tuple[np.ndarray, np.ndarray]:
    """The 20 best logprobs [steps, B, 20] of a prefill and forced decode steps, and the tokens [steps, B]."""
    small = {"max_sequences": 3, "decode_sequences": (3,), "prefill_tokens": (64,), "compile_threads": 2}
    runner = build_tiny("qwen3", dtype="bfloat16", **(small | changes))
    builder = builder_for(runner)
    params = SamplingParams(temperature=0, logprobs=20)
    rows = [builder.sequence(slot, prompt, params) for slot, prompt in enumerate(PROMPTS)]
    outputs = [runner.forward(builder.prefill([(row, len(row.tokens)) for row in rows]))]
    for step in range(3):
        for row, prompt in zip(rows, PROMPTS, strict=True):
            row.tokens.append(prompt[step % len(prompt)])
        outputs.append(runner.forward(builder.decode(rows, from_slot=False)))
    return np.stack([out.top_logprobs for out in outputs]), np.stack([out.token_ids for out in outputs])


def test_logprobs_stay_near_those_of_16_bits() -> None:
    """Stated bound: half the deviation of the best 20 logprobs, and the token wherever it leads by twice that."""
    wide, tokens = logprobs(cache_dtype="bfloat16")
    narrow, narrow_tokens = logprobs(cache_dtype="uint16", kv_dtype=FP8_DTYPE)
    bound = 0.5 * wide.std(axis=-1).mean()
    difference = np.abs(wide - narrow).max()
    assert 0 < difference < bound
    clear = wide[..., 0] - wide[..., 1] > 2 * bound
    assert clear.any()
    np.testing.assert_array_equal(tokens[clear], narrow_tokens[clear])
    # At a scale of a million everything rounds to zero: the option reaches the arena.
    coarse, _ = logprobs(cache_dtype="uint16", kv_dtype=FP8_DTYPE, kv_scale=1e6)
    assert np.abs(coarse - wide).max() > 2 * difference


FAMILIES = ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow), pytest.param("lfm2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_is_the_same_however_the_engine_gets_there(family: str) -> None:
    """Full, sliding and state groups: only keys and values are narrow, all in one arena."""
    settings = Settings(kv_dtype=FP8_DTYPE, buckets=family != "llama", output_tokens=8)
    kit = ConformanceKit(random_checkpoint(TINY_CONFIGS[family], seed=5), settings=settings)
    report = kit.run(EQUALITIES, family)
    assert report.passed, str(report)


@pytest.mark.parametrize("cache_dtype", ["float32", pytest.param("uint16", marks=pytest.mark.slow)])
def test_no_program_copies_the_arena(cache_dtype: str) -> None:
    runner = build_tiny(
        "llama", cache_dtype=cache_dtype, kv_dtype=FP8_DTYPE, decode_sequences=(4,), prefill_tokens=(8,)
    )
    arena = NUM_PAGES * runner.config.geometry.page_bytes
    for (bucket, _), program in runner._programs.compiled.items():
        assert program_temporary_bytes(program) < arena / 25, bucket


def test_a_page_takes_half_the_bytes_of_16_bits() -> None:
    geometry = {
        kv_dtype: build_runner(
            tiny_checkpoint("llama"), tiny_options(dtype="bfloat16", cache_dtype="uint16", kv_dtype=kv_dtype)
        ).config.geometry
        for kv_dtype in (None, FP8_DTYPE)
    }
    assert geometry[None].page_bytes == 2 * geometry[FP8_DTYPE].page_bytes
    assert geometry[None].groups == geometry[FP8_DTYPE].groups


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"kv_dtype": FP8_DTYPE, "kv_scale": 0.0}, "kv_scale"),
        ({"kv_dtype": FP8_DTYPE, "cache_dtype": "bfloat16"}, "cache_dtype"),
        ({"kv_dtype": FP8_DTYPE, "cache_dtype": "float32", "kernels": "interpret"}, "cache_dtype"),
        ({"cache_dtype": "uint16"}, "cache_dtype"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        build_runner(tiny_checkpoint("llama"), replace(RunnerOptions(compile_cache_bytes=0), **changes))
    assert error.value.field == field
