"""`python -m bench scheduler`: host time of `Engine.step()` on a runner that costs nothing.

Each case runs decode steps with every slot busy, events taken, metrics on and sampling columns filled, and reports the
distribution of the time from entry to return; the admission case reports the step that admits and plans a long prompt.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from bench.arguments import positive_int
from resin import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    CacheGroup,
    Engine,
    ForwardOutput,
    HistoryGroup,
    Phase,
    Plane,
    Policy,
    RunnerConfig,
    SamplingParams,
    StateGroup,
    WindowGroup,
    plan_geometry,
)

CONTEXT_TOKENS = 4096
PAGE_TOKENS = 16


class FreeRunner:
    """Returns the same token at once; offers dispatch and collect, so that the engine overlaps."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self._indptr = np.arange(config.max_sequences + 1, dtype=np.int64)
        self._tokens = np.full(config.max_sequences, 7, np.int32)
        self.phase = Phase.PREFILL  # of the latest plan

    def bind(self, arena: ArenaSpec) -> None:
        """Nothing to allocate."""

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        count, self.phase = plan.num_sequences, plan.phase
        if plan.phase is Phase.DECODE:
            return ForwardOutput(self._tokens[:count], self._indptr[: count + 1])
        emits = plan.emits
        return ForwardOutput(self._tokens[: int(emits.sum())], np.concatenate([[0], np.cumsum(emits)]))

    dispatch = forward

    def collect(self, handle: ForwardOutput) -> ForwardOutput:
        return handle


def case_config(groups: tuple[CacheGroup, ...], sequences: int, context_tokens: int) -> RunnerConfig:
    """A GPU-like table: one decode bucket for each power of two, one prefill bucket."""
    geometry = plan_geometry(groups, arena_dtype="bfloat16", page_tokens=PAGE_TOKENS)
    spans = [fill.span_tokens for fill in geometry.groups]
    rows = tuple(sequences * (context_tokens // span + 1) if span else 0 for span in spans)
    sizes = sorted({1 << power for power in range(sequences.bit_length())} | {sequences})
    return RunnerConfig(
        vocab_size=128_256,
        max_sequences=sequences,
        max_context_tokens=context_tokens,
        max_plan_tokens=8192,
        groups=groups,
        geometry=geometry,
        buckets=(
            Bucket(Phase.PREFILL, 16, 8192, rows),
            *(Bucket(Phase.DECODE, size, size, rows) for size in sizes),
        ),
        arena_dtype="bfloat16",
    )


KV = Plane("kv", 32 * 2 * 8, 128)
HISTORY = (HistoryGroup("history", (KV,)),)
HYBRID = (
    HistoryGroup("history", (Plane("kv", 12 * 2 * 8, 64),)),
    WindowGroup("window", (Plane("kv", 12 * 2 * 8, 64),), 128),
    StateGroup("state", (Plane("state", 20, 2048),)),
)
HYBRID_NAME = "history+window+state"
PARAMS = SamplingParams(max_output_tokens=100_000, temperature=0.8, top_p=0.95, top_k=40, stop_token_ids=(2, 3))


CHUNK_STEPS = 20  # of one case in a row
STILL, PREFIX_CACHE, CONSTRAINED = "", ", prefix cache", ", one of them constrained"
WAITING, TURNOVER = ", waits for each", ", one ends and one joins, waits for each"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Microseconds."""

    median_us: float
    p90_us: float
    p99_us: float
    worst_us: float
    steps: int


def distribution(seconds: Sequence[float]) -> Distribution:
    micros = np.asarray(seconds) * 1e6
    median, p90, p99, worst = (round(float(np.quantile(micros, q)), 1) for q in (0.5, 0.9, 0.99, 1.0))
    return Distribution(median, p90, p99, worst, steps=len(micros))


def decode_steps(
    groups: tuple[CacheGroup, ...],
    sequences: int,
    most: int,
    *,
    prefix_cache: bool = False,
    constrained: int = 0,
    overlap: int = 1,
    context_tokens: int = CONTEXT_TOKENS,
) -> Iterator[float]:
    """Seconds of each step of rows around some context, staggered so that pages fill at different steps.

    Args:
        most: steps that are asked for at most.
        constrained: rows with a mask, which costs nothing to make.
    """
    config = case_config(groups, sequences, context_tokens + 2 * most + 256)
    mask = np.full(-(-config.vocab_size // 32), -1, np.int32)
    masked = replace(PARAMS, allowed_tokens=lambda output: mask)
    with Engine(FreeRunner(config), prefix_cache=prefix_cache, overlap=overlap) as engine:
        rng = np.random.default_rng(0)
        for row in range(sequences):
            params = masked if sequences // 2 <= row < sequences // 2 + constrained else PARAMS
            engine.submit(rng.integers(0, 128_000, context_tokens - row % 64), sampling_params=params)
        while engine.scheduler.replicas[0].prefill.requests or len(engine.scheduler.queue):
            engine.step()
        for _ in range(50):
            engine.step()
        while True:
            yield _time_step(engine)


def turnover_steps(
    groups: tuple[CacheGroup, ...],
    sequences: int,
    phase: Phase = Phase.DECODE,
    *,
    context_tokens: int = CONTEXT_TOKENS,
) -> Iterator[float]:
    """Seconds of each step of one phase while every decode step ends one row, and the one after the next prefill step
    has another in its place.

    Nothing is in flight while the next plan is made, so that each step holds all of its own work: to be held against
    `decode_steps(overlap=0)`.
    """
    config = case_config(groups, sequences, context_tokens + 2 * sequences)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 128_000, context_tokens - row % 64) for row in range(64)]
    runner = FreeRunner(config)
    # All rows start to decode together, and from the second step on one after the other ends.
    with Engine(runner, overlap=0, policy=Policy(prefill_streak_tokens=1 << 30)) as engine:

        def submit(number: int, outputs: int) -> None:
            params = replace(PARAMS, max_output_tokens=outputs)
            engine.submit(prompts[number % len(prompts)], sampling_params=params)

        for row in range(sequences):
            submit(row, 3 + row)  # the first of these tokens comes with the prefill plan
        while engine.scheduler.replicas[0].prefill.requests or len(engine.scheduler.queue):
            engine.step()
        for number in itertools.count():
            if not len(engine.scheduler.queue):
                submit(number, sequences + 1)
            before = len(engine.scheduler.replicas[0].decode.requests)
            elapsed = _time_step(engine)
            if number > sequences:
                assert abs(len(engine.scheduler.replicas[0].decode.requests) - before) == 1, (
                    "one row ends, or one joins"
                )
                if runner.phase is phase:
                    yield elapsed


def _time_step(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def measured(cases: Mapping[str, Iterator[float]], steps: int) -> dict[str, Distribution]:
    """Steps of every case, some of one and then some of the next, so that what disturbs the machine disturbs all."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        next(case)  # what comes before the steps
    gc.collect()
    for done in range(0, steps, CHUNK_STEPS):
        for name, case in cases.items():
            next(case)  # the caches are another case's
            seconds[name] += itertools.islice(case, min(CHUNK_STEPS, steps - done))
    for case in cases.values():
        cast("Generator[float]", case).close()
    return {name: distribution(values) for name, values in seconds.items()}


def change_cases(
    groups: tuple[CacheGroup, ...], sequences: int, steps: int, *, context_tokens: int = CONTEXT_TOKENS
) -> dict[str, Iterator[float]]:
    """What changes in a set of decode rows, and the still cases to hold it against."""
    most = steps + steps // CHUNK_STEPS + 2
    decode = partial(decode_steps, groups, sequences, most, context_tokens=context_tokens)
    return {
        STILL: decode(),
        PREFIX_CACHE: decode(prefix_cache=True),
        CONSTRAINED: decode(constrained=1),
        WAITING: decode(overlap=0),
        TURNOVER: turnover_steps(groups, sequences, context_tokens=context_tokens),
    }


def admission_case(prompt_tokens: int, repeats: int) -> Distribution:
    """The step that admits a prompt whose prefix is wholly cached, and plans what is left of it."""
    config = case_config(HISTORY, 32, 2 * prompt_tokens)
    seconds = []
    with Engine(FreeRunner(config), prefix_cache=True) as engine:
        prompt = np.random.default_rng(0).integers(0, 128_000, prompt_tokens)
        for _ in range(repeats + 3):
            request = engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=2))
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
            while not request.is_finished or engine.has_work():
                engine.step()
            assert not seconds[3:] or request.prefix_hit_tokens >= prompt_tokens - PAGE_TOKENS
    return distribution(seconds[3:])


def measure(steps: int) -> dict[str, Distribution]:
    """Every case by name."""
    results = measured({"history 32": decode_steps(HISTORY, 32, 2 * steps)}, steps)
    for name, groups in (("history", HISTORY), (HYBRID_NAME, HYBRID)):
        found = measured(change_cases(groups, 256, steps), steps)
        results |= {f"{name} 256{case}": row for case, row in found.items()}
    results |= measured({"history 256, the prefill step between": turnover_steps(HISTORY, 256, Phase.PREFILL)}, steps)
    results["admission 16k prompt, prefix cached"] = admission_case(16_384, max(steps // 10, 20))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench scheduler", description=__doc__)
    parser.add_argument("--steps", type=positive_int, default=2000, help="timed steps a case (default 2000)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    results = measure(args.steps)
    if args.json:
        rows = {name: {field: getattr(row, field) for field in row.__slots__} for name, row in results.items()}
        print(json.dumps({"python": platform.python_version(), "numpy": np.__version__, "cases": rows}, indent=1))
        return 0
    print(f"{'case':54} {'median':>9} {'p90':>9} {'p99':>9} {'worst':>9}  us")
    for name, row in results.items():
        print(f"{name:54} {row.median_us:9.1f} {row.p90_us:9.1f} {row.p99_us:9.1f} {row.worst_us:9.1f}")
    return 0
