"""`python -m bench scheduler`: host time of `Engine.step()` on a runner that costs nothing.

Each case runs decode steps with every slot busy, events taken, metrics on and sampling columns filled, and reports the
distribution of the time from entry to return; the admission case reports the step that admits and plans a long prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


def decode_case(
    groups: tuple[CacheGroup, ...],
    sequences: int,
    steps: int,
    *,
    prefix_cache: bool = False,
    constrained: int = 0,
    overlap: int = 1,
) -> Distribution:
    """Steps of `sequences` rows around 4k tokens of context, staggered so that pages fill at different steps.

    Args:
        constrained: rows with a mask, which costs nothing to make.
    """
    config = case_config(groups, sequences, CONTEXT_TOKENS + 2 * steps + 256)
    mask = np.full(-(-config.vocab_size // 32), -1, np.int32)
    masked = replace(PARAMS, allowed_tokens=lambda output: mask)
    with Engine(FreeRunner(config), prefix_cache=prefix_cache, overlap=overlap) as engine:
        rng = np.random.default_rng(0)
        for row in range(sequences):
            params = masked if sequences // 2 <= row < sequences // 2 + constrained else PARAMS
            engine.submit(rng.integers(0, 128_000, CONTEXT_TOKENS - row % 64), sampling_params=params)
        while engine.scheduler.prefilling or len(engine.scheduler.queue):
            engine.step()
        for _ in range(50):
            engine.step()
        return distribution(_time_steps(engine, steps))


def turnover_case(groups: tuple[CacheGroup, ...], sequences: int, steps: int) -> dict[str, Distribution]:
    """Every decode step ends one row, and the one after the next prefill step has another in its place.

    Nothing is in flight while the next plan is made, so that each step holds all of its own work.

    Returns:
        decode steps and prefill steps.
    """
    config = case_config(groups, sequences, CONTEXT_TOKENS + 2 * sequences)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 128_000, CONTEXT_TOKENS - row % 64) for row in range(64)]
    runner = FreeRunner(config)
    # All rows start to decode together, and from the second step on one after the other ends.
    with Engine(runner, overlap=0, policy=Policy(prefill_streak_tokens=1 << 30)) as engine:

        def submit(number: int, outputs: int) -> None:
            params = replace(PARAMS, max_output_tokens=outputs)
            engine.submit(prompts[number % len(prompts)], sampling_params=params)

        for row in range(sequences):
            submit(row, 3 + row)  # the first of these tokens comes with the prefill plan
        while engine.scheduler.prefilling or len(engine.scheduler.queue):
            engine.step()
        seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        gc.collect()
        number = 0
        while len(seconds[Phase.DECODE]) < steps:
            if not len(engine.scheduler.queue):
                submit(number, sequences + 1)
            number += 1
            before = len(engine.scheduler.decoding)
            started = time.perf_counter()
            engine.step()
            elapsed = time.perf_counter() - started
            if number > sequences:
                assert abs(len(engine.scheduler.decoding) - before) == 1, "one row ends, or one joins"
                seconds[runner.phase].append(elapsed)
    return {"decode": distribution(seconds[Phase.DECODE]), "prefill": distribution(seconds[Phase.PREFILL])}


def _time_steps(engine: Engine, steps: int) -> list[float]:
    seconds = []
    gc.collect()
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds


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
    turnover = {
        name: turnover_case(groups, 256, steps) for name, groups in (("history", HISTORY), (HYBRID_NAME, HYBRID))
    }
    return {
        "history 32": decode_case(HISTORY, 32, steps, prefix_cache=False),
        "history 256": decode_case(HISTORY, 256, steps, prefix_cache=False),
        "history 256 prefix cache": decode_case(HISTORY, 256, steps, prefix_cache=True),
        "history 256, one of them constrained": decode_case(HISTORY, 256, steps, constrained=1),
        "history 256, waits for each": decode_case(HISTORY, 256, steps, overlap=0),
        "history 256, one ends and one joins": turnover["history"]["decode"],
        "history 256, the prefill step between": turnover["history"]["prefill"],
        "history+window+state 256": decode_case(HYBRID, 256, steps, prefix_cache=False),
        "history+window+state 256, one constrained": decode_case(HYBRID, 256, steps, constrained=1),
        "history+window+state 256, waits for each": decode_case(HYBRID, 256, steps, overlap=0),
        "history+window+state 256, one ends, one joins": turnover[HYBRID_NAME]["decode"],
        "history+window+state 256 prefix cache": decode_case(HYBRID, 256, steps, prefix_cache=True),
        "admission 16k prompt, prefix cached": admission_case(16_384, max(steps // 10, 20)),
    }


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
    print(f"{'case':46} {'median':>9} {'p90':>9} {'p99':>9} {'worst':>9}  us")
    for name, row in results.items():
        print(f"{name:46} {row.median_us:9.1f} {row.p90_us:9.1f} {row.p99_us:9.1f} {row.worst_us:9.1f}")
    return 0
