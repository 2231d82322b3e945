"""Prompts of which nothing is cached: which plans run the program that reads no pages, and that it changes nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin import Engine
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.pallas_kernels.fresh_prefill import fresh_prefill_attention
from resin.plan import InvalidRequest, Phase, SamplingParams
from resin.runtime import ModelRunner, RunnerOptions, build_runner
from resin.runtime.ledger import program_temporary_bytes
from resin.runtime.program_kind import FRESH_BUCKET_TOKENS, ProgramKind, plan_kind
from tests.pallas_kernels.paged_cases import build_case, dense_attention, relative_error
from tests.plan_builder import PlanBuilder
from tests.runtime.bf16_equalities import PAGES, Bf16Equalities, KindRecorder
from tests.runtime.tiny_runner import tiny_options

TOKENS = FRESH_BUCKET_TOKENS
PROMPT = np.random.default_rng(0).integers(3, 256, 2 * TOKENS).tolist()
PLAIN, ALL, FRESH, ANY = ProgramKind.PLAIN, ProgramKind.ALL, ProgramKind.FRESH, ProgramKind.ANY


def build(family: str = "llama", **changes: object) -> ModelRunner:
    """A cold runner with one small and one long prefill bucket; a llama of one layer, which compiles sooner."""
    config = {**TINY_CONFIGS[family], "max_position_embeddings": 4 * TOKENS}
    config |= {"num_hidden_layers": 1} if family == "llama" else {}
    settings = {
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "kernels": "interpret",
        "max_sequences": 2,
        "max_context_tokens": 2 * TOKENS,
        "decode_sequences": (2,),
        "prefill_tokens": (64, TOKENS),
    }
    return build_runner(random_checkpoint(config, seed=5), tiny_options(**(settings | changes)))


def kinds_by_tokens(runner: ModelRunner) -> dict[int, tuple[ProgramKind, ...]]:
    return {bucket.tokens: kinds for bucket, kinds in runner._programs.kinds.items()}


def test_long_prefill_buckets_have_a_fresh_program() -> None:
    assert kinds_by_tokens(build()) == {64: (PLAIN, ALL), TOKENS: (PLAIN, ALL, FRESH), 2: (PLAIN, ALL)}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"kernels": "reference"}, (ANY,)),
        ({"dtype": "float32", "cache_dtype": "float32"}, (PLAIN, ALL)),
        ({"cache_dtype": "float32"}, (PLAIN, ALL)),
        ({"cache_dtype": "uint16"}, (PLAIN, ALL, FRESH)),
        ({"cache_dtype": "uint16", "kv_dtype": "float8_e4m3fn"}, (PLAIN, ALL)),
        ({"fresh_attention": "paged"}, (PLAIN, ALL)),
        ({"tp": 2}, (PLAIN, ALL)),
    ],
    ids=str,
)
def test_buckets_without_one(changes: dict[str, object], kinds: tuple[ProgramKind, ...]) -> None:
    assert kinds_by_tokens(build(**changes))[TOKENS] == kinds


def test_the_option_is_checked() -> None:
    with pytest.raises(InvalidRequest, match="fresh_attention"):
        RunnerOptions(fresh_attention="flash")


def test_the_program_of_a_plan() -> None:
    runner = build()
    builder = PlanBuilder(runner.config, 4 * PAGES)

    def kind(*chunks: tuple[int, int], **params: int) -> ProgramKind:
        """Of a plan with these chunks (cached tokens, then tokens) of sequences of their own."""
        planned = []
        for slot, (cached, count) in enumerate(chunks):
            settings = SamplingParams(**{"temperature": 0, **params})  # type: ignore[arg-type]
            sequence = builder.sequence(slot, PROMPT[: cached + count], settings)
            sequence.cached = cached
            planned.append((sequence, count))
        plan = builder.prefill(planned)
        return plan_kind(plan, runner._programs.kinds[plan.bucket])

    assert kind((0, TOKENS)) is FRESH
    assert kind((0, TOKENS - TOKENS // 8)) is FRESH
    assert kind((0, TOKENS // 2)) is PLAIN, "cuDNN would compute the padding"
    assert kind((0, 60)) is PLAIN, "a small bucket"
    assert kind((16, TOKENS)) is PLAIN, "a cached prefix or an earlier chunk"
    assert kind((0, TOKENS - 16), (0, 16)) is PLAIN, "two sequences"
    assert kind((0, TOKENS), logprobs=0) is ALL
    assert kind((0, TOKENS), prompt_logprobs=1) is ALL
    decoded = builder.decode([builder.sequence(0, PROMPT[:1])])
    assert plan_kind(decoded, runner._programs.kinds[decoded.bucket]) is PLAIN


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def equalities(request: pytest.FixtureRequest) -> Bf16Equalities:
    """Gemma's windowed layers read pages between others that do not."""
    return Bf16Equalities(build(request.param, prefill_tokens=(TOKENS,), page_tokens=32), outputs=6)


def test_tokens_are_those_of_the_paged_program(equalities: Bf16Equalities) -> None:
    assert equalities.check_fresh() > 4


def test_chunks_prefix_hits_and_company_read_pages(equalities: Bf16Equalities) -> None:
    recorder = KindRecorder(equalities.runner, equalities.runner._bound_arena())
    params = SamplingParams(temperature=0, max_output_tokens=1, ignore_stop=True)
    with Engine(recorder, enable_metrics=False, prefix_cache=True) as engine:

        def run(*prompts: list[int]) -> list[ProgramKind]:
            for prompt in prompts:
                engine.submit(np.asarray(prompt, np.int32), sampling_params=params)
            while engine.has_work():
                engine.step()
            return recorder.prefills()

        first, *others = run(PROMPT[: TOKENS + 900])
        assert first is FRESH and set(others) == {PLAIN}, "chunks after the first"
        assert run(PROMPT[:900] + PROMPT[-60:]) == [PLAIN], "a prefix hit"
        assert run(PROMPT[5:500], PROMPT[7:500]) == [PLAIN], "two sequences"


def test_warm_up_compiles_all_and_the_ledger_holds_the_largest(
    equalities: Bf16Equalities, caplog: pytest.LogCaptureFixture
) -> None:
    runner = equalities.runner
    programs = runner._programs
    assert set(programs.compiled) == {(bucket, kind) for bucket, kinds in programs.kinds.items() for kind in kinds}
    assert runner.observations()["executables"] == 5
    assert runner.ledger is not None
    assert runner.ledger.largest_temporary == max(map(program_temporary_bytes, programs.compiled.values()))
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        equalities.check_fresh()
    assert not [record.message for record in caplog.records if "ompil" in record.message]
    assert runner.observations()["compilations_after_ready"] == 0


def test_executable_is_the_program_that_runs_the_plan(equalities: Bf16Equalities) -> None:
    runner = equalities.runner
    if len(runner.config.groups) > 1:
        pytest.skip("plans by hand have one group")
    builder = PlanBuilder(runner.config, PAGES)
    for count, kind in ((TOKENS, FRESH), (TOKENS // 2, PLAIN)):
        plan = builder.prefill([(builder.sequence(0, PROMPT[:count]), count)])
        assert plan.phase is Phase.PREFILL
        assert runner.executable(plan) is runner._programs.compiled[plan.bucket, kind]


def test_attention_in_plain_xla_is_causal() -> None:
    case = build_case([70], [70], heads=6, kv_heads=2, width=64, page_entries=16, seed=3)
    key, value = (np.asarray(part[0], np.float32) for part in (case.keys, case.values))
    attend = jax.jit(partial(fresh_prefill_attention, scale=case.scale, implementation="xla"))
    out = attend(jnp.asarray(case.q[:70], jnp.float32), key, value)
    assert relative_error(out, dense_attention(replace(case, q=case.q[:70]))) < 1e-5
