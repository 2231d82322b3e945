"""`python -m bench simulate TRACE`: the real engine over a request trace, with a runner that only models time.

A plan takes `base + tokens * per_token` of its bucket, on a simulated clock; the host costs nothing. Reports
throughput, TTFT and latency percentiles, the prefix-hit ratio beside the trace's ideal, bucket fill and retractions.
`--sequential` sends one request after another, prompts only, and compares the hits with a plain LRU replay.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.arguments import input_file, positive_float, positive_int
from bench.traces import BLOCK_TOKENS, TraceRequest, block_prompt, ideal_hits, load_trace, lru_hits, prompts
from resin import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    Engine,
    ForwardOutput,
    HistoryGroup,
    Phase,
    Plane,
    Request,
    RunnerConfig,
    SamplingParams,
    plan_geometry,
)
from resin.plan import StepTimes


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Milliseconds of a plan: base + padded tokens * per_token, by phase."""

    prefill_base_ms: float = 6.0
    prefill_token_ms: float = 0.024
    decode_base_ms: float = 4.0
    decode_token_ms: float = 0.035

    def plan_s(self, bucket: Bucket) -> float:
        if bucket.phase is Phase.PREFILL:
            return (self.prefill_base_ms + self.prefill_token_ms * bucket.tokens) / 1000
        return (self.decode_base_ms + self.decode_token_ms * bucket.tokens) / 1000


class TimedRunner:
    """Emits token 0 for every row and moves a simulated clock by the latency model."""

    def __init__(self, config: RunnerConfig, latency: LatencyModel) -> None:
        self.config = config
        self.now_s = 0.0
        self._latency = latency
        self._free_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def step_times(self) -> StepTimes:
        """What the latency model says, as an engine would measure it."""
        prefill, decode = self.config.of_phase(Phase.PREFILL), self.config.of_phase(Phase.DECODE)
        times = tuple((bucket.tokens, self._latency.plan_s(bucket)) for bucket in prefill)
        return StepTimes(times, self._latency.plan_s(decode[0]), 0.0)

    def bind(self, arena: ArenaSpec) -> None:
        """Nothing to allocate."""

    def dispatch(self, plan: BatchPlan) -> tuple[float, ForwardOutput]:
        self._free_s = max(self._free_s, self.now_s) + self._latency.plan_s(plan.bucket)
        emits = plan.emits
        indptr = np.concatenate([[0], np.cumsum(emits)])
        return self._free_s, ForwardOutput(np.zeros(int(indptr[-1]), np.int32), indptr)

    def collect(self, handle: tuple[float, ForwardOutput]) -> ForwardOutput:
        done_s, output = handle
        self.now_s = max(self.now_s, done_s)
        return output

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        return self.collect(self.dispatch(plan))


def simulated_config(page_tokens: int, max_sequences: int, context_tokens: int, plan_tokens: int) -> RunnerConfig:
    """History only: one vector a token, so that pages are whatever size was asked for."""
    groups = (HistoryGroup("history", (Plane("kv", 1, 8),)),)
    geometry = plan_geometry(groups, arena_dtype="bfloat16", page_tokens=page_tokens)
    rows = (max_sequences * (context_tokens // page_tokens + 2),)
    prefill = sorted({min(512, plan_tokens), min(2048, plan_tokens), plan_tokens})
    decode = sorted({size for size in (1, 4, 16, 64) if size < max_sequences} | {max_sequences})
    return RunnerConfig(
        max_sequences=max_sequences,
        max_context_tokens=context_tokens,
        max_plan_tokens=plan_tokens,
        groups=groups,
        geometry=geometry,
        buckets=(
            *(Bucket(Phase.PREFILL, max_sequences, tokens, rows) for tokens in prefill),
            *(Bucket(Phase.DECODE, size, size, rows) for size in decode),
        ),
        arena_dtype="bfloat16",
    )


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds."""

    p50: float
    p90: float
    p99: float


def percentiles(seconds: Sequence[float]) -> Percentiles:
    return Percentiles(*(round(float(np.quantile(seconds, q)), 4) for q in (0.5, 0.9, 0.99)))


def simulate(
    trace: Sequence[TraceRequest],
    *,
    cache_tokens: int,
    page_tokens: int,
    max_sequences: int,
    plan_tokens: int,
    latency: LatencyModel,
    prefix_cache: bool = True,
    speed: float = 1.0,
) -> dict[str, object]:
    """Replays the trace with its arrival times divided by `speed`."""
    context = max(request.prompt_tokens + request.output_tokens for request in trace) + 2
    runner = TimedRunner(simulated_config(page_tokens, max_sequences, context, plan_tokens), latency)
    pages = 1 + cache_tokens // page_tokens
    done: list[Request] = []
    with Engine(runner, prefix_cache=prefix_cache, cache_pages=pages, clock=runner.clock) as engine:
        waiting = list(zip(trace, prompts(trace), strict=True))[::-1]
        while waiting or engine.has_work():
            if not engine.has_work():
                runner.now_s = max(runner.now_s, waiting[-1][0].arrival_s / speed)
            while waiting and waiting[-1][0].arrival_s / speed <= runner.now_s:
                request, prompt = waiting.pop()
                params = SamplingParams(max_output_tokens=max(request.output_tokens, 1), temperature=0)
                done.append(engine.submit(prompt, sampling_params=params))
            engine.step()
        metrics = engine.metrics
        assert metrics is not None
        fill = {phase.name.lower(): _ratio(metrics.live_tokens[phase], metrics.padded_tokens[phase]) for phase in Phase}
        hit_tokens = sum(request.prefix_hit_tokens for request in done)
        hits, blocks = ideal_hits(trace)
        return {
            "requests": len(done),
            "simulated_s": round(runner.now_s, 1),
            "output_tokens_per_s": round(metrics.generated_tokens / runner.now_s, 1),
            "prompt_tokens_per_s": round(sum(len(request.prompt_ids) for request in done) / runner.now_s, 1),
            "ttft_s": asdict(percentiles([(r.first_token_s or 0) - r.submitted_s for r in done])),
            "latency_s": asdict(percentiles([(r.finished_s or 0) - r.submitted_s for r in done])),
            "prefix_hit_share": _ratio(hit_tokens, sum(len(request.prompt_ids) for request in done)),
            "ideal_hit_share_of_blocks": _ratio(hits, blocks),
            "prefix_lost_tokens": metrics.prefix_losses,
            "bucket_fill": fill,
            "retractions": engine.scheduler.replicas[0].retractions,
        }


def sequential_hits(trace: Sequence[TraceRequest], capacity_blocks: int | None) -> tuple[int, int]:
    """Blocks that the engine's prefix cache hits, and all blocks: one request at a time, prompts only.

    Every block counts as a whole one, a page is one block, the pool holds `capacity_blocks` (None: all of the trace),
    and the last token of a prompt is always computed.
    """
    longest = max(len(request.blocks) for request in trace)
    if capacity_blocks is None:
        capacity_blocks = len({block for request in trace for block in request.blocks})
    context = BLOCK_TOKENS * longest + 1
    capacity_blocks = max(capacity_blocks, longest + 1)
    config = simulated_config(BLOCK_TOKENS, 1, context, context)
    runner = TimedRunner(config, LatencyModel())
    hits = total = 0
    with Engine(runner, prefix_cache=True, cache_pages=capacity_blocks + 1, enable_metrics=False) as engine:
        for request in trace:
            prompt = block_prompt(request.blocks)
            sent = engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=1, temperature=0))
            while engine.has_work():
                engine.step()
            hits += sent.prefix_hit_tokens // BLOCK_TOKENS
            total += len(request.blocks)
    return hits, total


def compare_sequential(trace: Sequence[TraceRequest], capacities_tokens: Sequence[int]) -> list[dict[str, object]]:
    """The engine beside an independent plain LRU, for an endless pool and each bounded one."""
    longest = max(len(request.blocks) for request in trace)
    rows: list[dict[str, object]] = []
    for tokens in (None, *capacities_tokens):
        blocks = None if tokens is None else max(tokens // BLOCK_TOKENS, longest + 1)
        engine_hits, total = sequential_hits(trace, blocks)
        plain_hits, _ = lru_hits(trace, blocks)
        rows.append(
            {
                "capacity_tokens": "unbounded" if blocks is None else blocks * BLOCK_TOKENS,
                "engine_hit_share": _ratio(engine_hits, total, 6),
                "plain_lru_hit_share": _ratio(plain_hits, total, 6),
                "engine_hits": engine_hits,
                "plain_lru_hits": plain_hits,
                "blocks": total,
            }
        )
    return rows


def _ratio(part: float, whole: float, digits: int = 4) -> float:
    return round(part / whole, digits) if whole else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench simulate", description=__doc__)
    parser.add_argument(
        "trace", type=input_file, help="trace file: Mooncake .jsonl, Azure or Vidur .csv, gzipped or not"
    )
    parser.add_argument("--limit", type=positive_int, help="first requests only (default all)")
    parser.add_argument("--speed", type=positive_float, default=1.0, help="divide arrival times by this (default 1)")
    parser.add_argument(
        "--cache-tokens",
        type=positive_int,
        nargs="+",
        default=[2_000_000],
        help="pool size in tokens (default 2000000)",
    )
    parser.add_argument("--page-tokens", type=positive_int, default=16, help="tokens a page (default 16)")
    parser.add_argument("--max-sequences", type=positive_int, default=128, help="slots (default 128)")
    parser.add_argument("--plan-tokens", type=positive_int, default=8192, help="prefill tokens a plan (default 8192)")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument(
        "--sequential", action="store_true", help="one request at a time, prompts only, beside plain LRU"
    )
    for name, value in asdict(LatencyModel()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help=f"default {value}")
    args = parser.parse_args(argv)
    trace = load_trace(args.trace)[: args.limit]
    if args.sequential:
        if not all(request.blocks for request in trace):
            parser.error("--sequential needs a trace with hash_ids")
        for row in compare_sequential(trace, args.cache_tokens):
            print(json.dumps(row))
        return 0
    latency = LatencyModel(**{name: getattr(args, name) for name in asdict(LatencyModel())})
    for tokens in args.cache_tokens:
        result = simulate(
            trace,
            cache_tokens=tokens,
            page_tokens=args.page_tokens,
            max_sequences=args.max_sequences,
            plan_tokens=args.plan_tokens,
            latency=latency,
            prefix_cache=not args.no_prefix_cache,
            speed=args.speed,
        )
        print(json.dumps({"cache_tokens": tokens, **result}, indent=1))
    return 0
