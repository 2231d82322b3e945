"""Replicas of attention in one program: what each request gets is what it gets on one device alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.replay import replay
from resin import Engine, Policy, SamplingParams, TokensEvent
from resin.models.testing import random_checkpoint
from resin.plan import ArenaSpec, InvalidRequest, Phase, PlanRejected, empty_plan, empty_step
from resin.record import Recording
from resin.runtime import ModelRunner, build_runner
from resin.runtime.collectives import count_collectives
from tests.runtime.tiny_runner import tiny_options
from tests.runtime.wide_configs import WIDE_CONFIGS

LENGTHS = (3, 21, 40, 17, 33)
GREEDY = SamplingParams(max_output_tokens=20, temperature=0, ignore_stop=True)
POLICIES = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=5),
    replace(GREEDY, repetition_penalty=1.4, logit_bias={7: 2.0}),
    replace(GREEDY, logprobs=2),
    GREEDY,
)
PROMPTS = [np.random.default_rng(length).integers(3, 256, length).astype(np.int32) for length in LENGTHS]


@cache
def runner_of(family: str, dp: int, tp: int) -> ModelRunner:
    checkpoint = random_checkpoint(WIDE_CONFIGS[family], seed=9)
    runner = build_runner(checkpoint, tiny_options(dp=dp, tp=tp, decode_sequences=(4,), prefill_tokens=(32,)))
    runner.bind(ArenaSpec(64, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    return runner


def engine_of(family: str, dp: int, tp: int, **options: Any) -> Engine:
    return Engine(runner_of(family, dp, tp).view(), enable_metrics=False, **options)


def run(engine: Engine, replicas: Sequence[int | None]) -> list[list[int]]:
    """Every prompt on each of these replicas, all at once."""
    requests = [
        engine.submit(prompt, sampling_params=params, replica=replica)
        for replica in replicas
        for prompt, params in zip(PROMPTS, POLICIES, strict=True)
    ]
    while engine.has_work():
        engine.step()
        engine.scheduler.check_integrity()
    for request, replica in zip(requests, [replica for replica in replicas for _ in PROMPTS], strict=True):
        assert replica in (None, request.home)
    return [request.take_result() for request in requests]


@cache
def alone(family: str) -> list[list[int]]:
    with engine_of(family, 1, 1, overlap=0) as engine:
        found = []
        for prompt, params in zip(PROMPTS, POLICIES, strict=True):
            request = engine.submit(prompt, sampling_params=params)
            while engine.has_work():
                engine.step()
            found.append(request.take_result())
        return found


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"overlap": 0},
    "overlapped": {"overlap": 2},
    "chunked": {"policy": Policy(max_plan_tokens=7)},
    "retracted": {"overlap": 1, "cache_pages": 8, "context_length": 64},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("family", "dp", "tp"),
    [
        ("llama", 2, 1),
        ("gpt_oss", 2, 2),
        pytest.param("lfm2", 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_each_replica_gives_what_one_device_gives(family: str, dp: int, tp: int, setting: str) -> None:
    with engine_of(family, dp, tp, **SETTINGS[setting]) as engine:
        found = run(engine, range(dp))
        retractions = [replica.retractions for replica in engine.scheduler.replicas]
    assert found == alone(family) * dp
    assert setting != "retracted" or any(retractions)


def test_a_replica_without_work_takes_part_and_gets_nothing() -> None:
    with engine_of("gpt_oss", 2, 2, overlap=1) as engine:
        assert run(engine, [1]) == alone("gpt_oss")
        assert engine.scheduler.replicas[0].num_running == 0


def test_prefixes_are_found_on_the_replica_that_computed_them() -> None:
    with engine_of("llama", 2, 1, prefix_cache=True) as engine:
        (request,) = (engine.submit(PROMPTS[4], sampling_params=GREEDY, replica=1),)
        while engine.has_work():
            engine.step()
        again = engine.submit(PROMPTS[4], sampling_params=GREEDY)
        while engine.has_work():
            engine.step()
        assert (request.home, again.home, again.prefix_hit_tokens) == (1, 1, 32)
        assert again.take_result() == request.take_result() == alone("llama")[4]


def test_a_recording_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.plans"
    with engine_of("llama", 2, 1, record=path, prefix_cache=True) as engine:
        run(engine, [None, 1])
    recording, runner = Recording(path), runner_of("llama", 2, 1)
    assert recording.config.replicas == 2 and len(recording.steps) % 2 == 0
    pairs = zip(recording.steps[::2], recording.steps[1::2], strict=True)
    assert all(first.plan.step == second.plan.step for first, second in pairs)
    agreed, difference = replay(recording.steps, runner, logprob_tolerance=1e-4)
    assert (agreed, difference) == (len(recording.steps), None)


def test_experts_gather_the_tokens_of_all_replicas_once_a_layer() -> None:
    """Rows, their experts and their weights come in, sums of all devices go out; attention sums within a replica."""
    runner = runner_of("qwen3_moe", 2, 2)
    bucket = runner.config.of_phase(Phase.DECODE)[0]
    found = count_collectives(runner.executable(empty_step(runner.config, bucket)).as_text())
    layers, dense = 3, 1
    assert found["reduce-scatter"].calls == layers - dense
    assert found["all-gather"].calls == 3 * (layers - dense) + 4
    assert found["all-reduce"].calls == 1 + 2 * layers


def test_what_fits_no_replica_is_refused() -> None:
    runner = runner_of("llama", 2, 1)
    bucket = runner.config.buckets[0]
    with pytest.raises(PlanRejected, match="1 plans, expected one for each of 2 replicas"):
        runner.accept(empty_plan(runner.config, bucket))
    with engine_of("llama", 2, 1) as engine, pytest.raises(InvalidRequest, match="replica=2: expected 0 to 1"):
        engine.submit(PROMPTS[0], replica=2)
    experts = WIDE_CONFIGS["qwen3_moe"] | {"num_experts": 6}
    with pytest.raises(InvalidRequest, match="dp x tp=4: expected a divisor of num_experts=6"):
        build_runner(random_checkpoint(experts), tiny_options(dp=2, tp=2))


def test_masks_of_one_replica_leave_the_others_alone() -> None:
    only = np.zeros(256, np.bool_)
    only[11] = True
    with engine_of("llama", 2, 1, overlap=0) as engine:
        masked = engine.submit(PROMPTS[0], sampling_params=replace(GREEDY, allowed_tokens=lambda _: only), replica=1)
        free = engine.submit(PROMPTS[1], sampling_params=GREEDY, replica=0)
        tokens = 0
        while engine.has_work():
            tokens += sum(len(event.token_ids) for event in engine.step() if isinstance(event, TokensEvent))
        assert masked.take_result() == [11] * 20 and tokens == 40
        assert len(free.take_result()) == 20
