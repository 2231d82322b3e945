"""What steps cost on this machine: measured once, at warm-up, with plans that hold no row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from resin.plan import Bucket, Phase, RunnerConfig, StepPlan, StepTimes, empty_step

# A bucket that takes longer is the last that is measured: rows that decode are not to wait for it.
LONGEST_S = 0.2
# A step that takes longer hides any read-back behind one plan in flight.
LONG_STEP_S = 0.01
LAUNCHES = 16  # queued behind each other


def measure_steps(
    config: RunnerConfig, launch: Callable[[StepPlan], Any], forward: Callable[[StepPlan], Any]
) -> StepTimes:
    """Times programs that are compiled, on an arena that nobody uses yet.

    Args:
        config: its buckets, smallest first within a phase.
        launch: starts a plan and returns arrays of its results.
        forward: runs a plan and reads its results back.
    """
    prefill: list[tuple[int, float]] = []
    if config.max_sequences > 1:  # else no row decodes while a prompt comes in
        for bucket in config.of_phase(Phase.PREFILL):
            plan = empty_step(config, bucket)
            first_s = _seconds(launch, plan)
            prefill.append((bucket.tokens, first_s if first_s > LONGEST_S else min(first_s, _seconds(launch, plan))))
            if prefill[-1][1] > LONGEST_S:
                break
    decode = config.of_phase(Phase.DECODE)
    plan = empty_step(config, decode[0])
    forward(plan)
    alone_s = min(_seconds(forward, plan) for _ in range(2))
    costs = tuple((bucket.sequences, _draft_cost(config, launch, bucket)) for bucket in decode if bucket.width > 1)
    if alone_s > LONG_STEP_S:
        return StepTimes(tuple(prefill), alone_s, 0.0, costs)
    step_s = min(_seconds(launch, plan, LAUNCHES) for _ in range(2)) / LAUNCHES
    return StepTimes(tuple(prefill), step_s, max(alone_s - step_s, 0.0), costs)


def _draft_cost(config: RunnerConfig, launch: Callable[[StepPlan], Any], wide: Bucket) -> float:
    """Time of a step with places for drafts over that of as many sequences without."""
    sequences = [bucket for bucket in config.of_phase(Phase.DECODE) if bucket.width == 1]
    plain = next(bucket for bucket in sequences if bucket.sequences >= wide.sequences)
    seconds = []
    for bucket in (plain, wide):
        plan = empty_step(config, bucket)
        first_s = _seconds(launch, plan)
        times = 1 if first_s > LONG_STEP_S else LAUNCHES
        seconds.append(min(_seconds(launch, plan, times) for _ in range(3)) / times)
    return seconds[1] / seconds[0]


def _seconds(run: Callable[[StepPlan], Any], plan: StepPlan, times: int = 1) -> float:
    """Of so many runs, one queued behind the other."""
    started = time.perf_counter()
    for _ in range(times):
        results = run(plan)
    jax.block_until_ready(results)
    return time.perf_counter() - started
