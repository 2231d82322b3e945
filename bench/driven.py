"""The same decode case through `Engine.submit` and `Engine.step`, beside the bare program in the same minute."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.cases import PATIENT, Case, random_prompts
from bench.roofline import burst_s
from resin import BatchPlan, Engine, SamplingParams
from resin.runtime import ModelRunner

SETTLE_STEPS = 4  # until the pipeline of plan, dispatch and commit is full again


@dataclass(frozen=True, slots=True)
class Driven:
    """Milliseconds a step, one value a round: engine-driven, and the resident plan right after it."""

    engine_ms: tuple[float, ...]
    bare_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return float(np.median(self.engine_ms))

    @property
    def ratio(self) -> float:
        """Median over the rounds of engine-driven over bare."""
        return float(np.median(np.divide(self.engine_ms, self.bare_ms)))


def growth_tokens(rounds: int, steps: int) -> int:
    """Tokens that a sequence gains until it is measured, with those that start it and the one in flight."""
    return rounds * (SETTLE_STEPS + steps) + 4


def slack_tokens(context_tokens: int, rounds: int, steps: int) -> int:
    """How far `drive` takes a sequence beyond the case's context."""
    growth = growth_tokens(rounds, steps)
    return growth - min(growth // 2, context_tokens - 1)


def drive(
    case: Case,
    runner: ModelRunner,
    plan: BatchPlan,
    params: SamplingParams,
    *,
    num_pages: int,
    rounds: int,
    steps: int,
    overlap: int = 1,
) -> Driven:
    """Decodes B sequences whose length passes the case's context half way through.

    Args:
        case: a decode case with `slack_tokens(...)`.
        runner: warm.
        plan: the case's resident plan. It writes to the engine's pages, so outputs mean nothing afterwards.
        params: sampling of every request.
        num_pages: pages of the runner's arena.
        rounds, steps: windows, and steps of each.
        overlap: plans in flight while the next is made.
    """
    growth = growth_tokens(rounds, steps)
    start = max(1, case.context_tokens - growth // 2)
    engine_ms, bare_ms = [], []
    engine = Engine(
        runner.view(**case.changes(runner.config)),
        context_length=case.max_context_tokens,
        cache_pages=num_pages,
        policy=PATIENT,
        overlap=overlap,
    )
    with engine:
        prompts = random_prompts(case, runner.config.vocab_size, [start] * case.sequences)
        requests = [
            engine.submit(
                prompt,
                sampling_params=replace(params, seed=seed, max_output_tokens=growth, ignore_stop=True),
            )
            for seed, prompt in enumerate(prompts)
        ]
        while not all(len(request.output_ids) >= 2 for request in requests):
            engine.step()
        for _ in range(rounds):
            for _ in range(SETTLE_STEPS):
                engine.step()
            started = time.perf_counter()
            for _ in range(steps):
                engine.step()
            engine_ms.append((time.perf_counter() - started) * 1000 / steps)
            bare_ms.append(burst_s(partial(runner.launch, plan), steps) * 1000)
        if any(request.is_finished for request in requests):
            raise RuntimeError(f"{case}: a request ended while it was timed")
    return Driven(tuple(engine_ms), tuple(bare_ms))
