"""The engine in bfloat16: on a GPU with a model of SmolLM2's shape, or of real weights; elsewhere with a tiny one."""

from __future__ import annotations

import logging

import jax
import pytest

from bench.shapes import shape_checkpoint
from resin.runtime import RunnerOptions, build_runner, load_runner
from tests.runtime.bf16_equalities import Bf16Equalities
from tests.runtime.tiny_runner import tiny_checkpoint, tiny_options

SIZES = {"max_sequences": 6, "max_context_tokens": 256, "page_tokens": 16, "prefill_sequences": 6}


def on_gpu(weights: str | None, kv_dtype: str | None) -> Bf16Equalities:
    # 1024 tokens have a fresh program.
    sizes = {**SIZES, "prefill_tokens": (256,)}
    if kv_dtype is None:
        sizes |= {"prefill_tokens": (32, 1024), "max_context_tokens": 1280}
    options = RunnerOptions(
        dummy=weights is None,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        decode_sequences=(6,) if kv_dtype else (1, 6),
        compile_threads=8,
        **sizes,
    )
    runner = (
        build_runner(shape_checkpoint("smollm2-135m"), options) if weights is None else load_runner(weights, options)
    )
    return Bf16Equalities(runner)


def tiny(kv_dtype: str | None, kernels: str) -> Bf16Equalities:
    options = tiny_options(
        dtype="bfloat16",
        cache_dtype="uint16" if kv_dtype else "bfloat16",
        kv_dtype=kv_dtype,
        kernels=kernels,
        decode_sequences=(6,) if kv_dtype else (1, 6),
        prefill_tokens=(128,) if kv_dtype else (32, 128),
        **SIZES,
    )
    return Bf16Equalities(build_runner(tiny_checkpoint("llama"), options), outputs=8)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gpu", None), marks=pytest.mark.gpu, id="gpu"),
        pytest.param(("gpu", "float8_e4m3fn"), marks=pytest.mark.gpu, id="gpu fp8"),
        pytest.param(("reference", None), marks=pytest.mark.slow, id="tiny"),
        pytest.param(("interpret", None), marks=pytest.mark.slow, id="interpreted"),
        pytest.param(("interpret", "float8_e4m3fn"), marks=pytest.mark.slow, id="interpreted fp8"),
    ],
)
def equalities(request: pytest.FixtureRequest) -> Bf16Equalities:
    kernels, kv_dtype = request.param
    if kernels != "gpu":
        return tiny(kv_dtype, kernels)
    if jax.default_backend() == "cpu":
        pytest.skip("no CUDA device")
    return on_gpu(request.config.getoption("--weights"), kv_dtype)


def test_company_and_overlap_change_nothing_within_a_bucket(equalities: Bf16Equalities) -> None:
    equalities.check_one_bucket()


def test_samples_depend_on_their_seeds_alone(equalities: Bf16Equalities) -> None:
    equalities.check_seeds()


def test_other_programs_agree_up_to_near_ties(equalities: Bf16Equalities) -> None:
    assert equalities.check_across_programs() > 20


def test_prompts_that_read_no_pages_agree_up_to_near_ties(equalities: Bf16Equalities) -> None:
    if not equalities.fresh_buckets():
        pytest.skip("no bucket has a program for them")
    assert equalities.check_fresh() > 4


def test_retracted_requests_agree_up_to_near_ties(equalities: Bf16Equalities) -> None:
    equalities.check_retraction()


def test_nothing_compiles_after_ready(equalities: Bf16Equalities, caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        equalities.run(overlap=True, prefix_cache=True)
    assert not [record.message for record in caplog.records if "ompil" in record.message]
    assert equalities.runner.observations()["compilations_after_ready"] == 0
