"""`python -m bench throughput --trace FILE`: a request trace through the Engine, all at once or at a given rate.

Prompts are random token ids of the trace's lengths, with the trace's shared prefixes; every request generates as many
tokens as the trace says. Reports tokens a second, times to first token and gaps, what each bucket's plans took and how
full they were, and, beside a sweep's results, what the same tokens would take at the sweep's rates.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.arguments import input_file, output_file, positive_float, positive_int
from bench.model_setup import ModelChoice, add_model_arguments, check_model_arguments
from bench.provenance import describe_run
from bench.results import newest_rows, read_results
from bench.serve import Job, Outcome, build_jobs, print_report, summarise
from bench.traces import TraceRequest, load_trace
from resin import (
    BatchPlan,
    Bucket,
    Engine,
    FinishedEvent,
    ForwardOutput,
    InvalidRequest,
    Request,
    SamplingParams,
    TokensEvent,
)
from resin.models.families import read_model
from resin.models.loading.checkpoint import Checkpoint
from resin.runtime import ModelRunner, RunnerOptions, build_runner

IDLE_POLL_S = 0.001


@dataclass(slots=True)
class BucketUse:
    """What the plans of one bucket added up to; `seconds` run from the end of the plan before, or from dispatch."""

    plans: int = 0
    seconds: float = 0.0
    live_tokens: int = 0


@dataclass
class ObservedRunner:
    """A runner that notes how long its plans take, in the order in which they are collected."""

    runner: ModelRunner
    uses: dict[Bucket, BucketUse] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.runner.config
        self.bind, self.unbind = self.runner.bind, self.runner.unbind
        self.accept, self.free_pages = self.runner.accept, self.runner.free_pages
        self.step_times, self.facts = self.runner.step_times, self.runner.facts
        self._ended_s = 0.0

    def dispatch(self, plan: BatchPlan) -> tuple[BatchPlan, float, Any]:
        return plan, time.perf_counter(), self.runner.dispatch(plan)

    def collect(self, handle: tuple[BatchPlan, float, Any]) -> ForwardOutput:
        plan, started_s, inner = handle
        output = self.runner.collect(inner)
        use = self.uses.setdefault(plan.bucket, BucketUse())
        now = time.perf_counter()
        use.plans += 1
        use.seconds += now - max(started_s, self._ended_s)
        use.live_tokens += plan.num_tokens
        self._ended_s = now
        return output

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        return self.collect(self.dispatch(plan))


def arrivals_of(jobs: Sequence[Job], rate: float | None, seed: int = 0) -> list[Job]:
    """The jobs at Poisson arrivals of `rate` requests a second; None leaves the trace's own times."""
    if rate is None:
        return list(jobs)
    times = np.random.default_rng(seed).exponential(1 / rate, len(jobs)).cumsum()
    return [Job(float(at_s), job.prompt, job.output_tokens) for at_s, job in zip(times, jobs, strict=True)]


def drive(engine: Engine, jobs: Sequence[Job]) -> list[Outcome]:
    """Submits each job when it is due and steps the engine until all have ended; outcomes in the order of the jobs."""
    outcomes: dict[Request, Outcome] = {}
    started = time.perf_counter()
    submitted = 0
    while submitted < len(jobs) or engine.has_work():
        now = time.perf_counter() - started
        while submitted < len(jobs) and jobs[submitted].at_s <= now:
            job = jobs[submitted]
            params = SamplingParams(temperature=0, max_output_tokens=job.output_tokens, ignore_stop=True)
            request = engine.submit(np.asarray(job.prompt, np.int32), sampling_params=params)
            outcomes[request] = Outcome(job.at_s, now, prompt_tokens=len(job.prompt))
            submitted += 1
        if not engine.has_work():
            time.sleep(min(max(jobs[submitted].at_s - now, 0.0), IDLE_POLL_S))
            continue
        for event in engine.step():
            now = time.perf_counter() - started
            if isinstance(event, TokensEvent):
                for row in event:
                    outcomes[row.request].chunk_s.append(now)
                    outcomes[row.request].output_tokens += len(row.token_ids)
            elif isinstance(event, FinishedEvent) and event.request.error is not None:
                outcomes[event.request].error = str(event.request.error)
    return list(outcomes.values())


def bucket_rows(uses: dict[Bucket, BucketUse]) -> list[dict[str, Any]]:
    """One row a bucket, the largest share of the time first."""
    rows = [
        {
            "phase": bucket.phase.name.lower(),
            "tokens": bucket.tokens,
            "sequences": bucket.sequences,
            "row_pages": bucket.row_pages,
            "plans": use.plans,
            "seconds": use.seconds,
            "ms": use.seconds / use.plans * 1000,
            "fill": use.live_tokens / (use.plans * bucket.tokens),
        }
        for bucket, use in uses.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def ideal_seconds(rows: Sequence[dict[str, Any]], jobs: Sequence[Job], slots: int) -> float:
    """What the tokens take at a sweep's rates: its best prefill, and its widest decode within the slots.

    Raises:
        InvalidRequest: the results hold no prefill or no decode row that fits.
    """
    prefill = [row["tokens_per_s_per_gpu"] for row in rows if row["phase"] == "prefill"]
    decode = [row for row in rows if row["phase"] == "decode" and row["sequences"] <= slots]
    if not prefill or not decode:
        raise InvalidRequest("sweep", len(rows), f"results of prefill, and of decode with at most {slots} sequences")
    widest = max(decode, key=lambda row: int(row["sequences"]))
    token_s = widest.get("engine_ms", widest["ms"]) / 1000 / widest["sequences"]
    prompt_tokens = sum(len(job.prompt) for job in jobs)
    decoded = sum(job.output_tokens - 1 for job in jobs)  # the first token is the prompt's
    return float(prompt_tokens / max(prefill) + decoded * token_s)


def cut_lengths(trace: Sequence[TraceRequest], longest_prompt: int | None) -> list[TraceRequest]:
    """The requests with prompts of at most so many tokens."""
    if longest_prompt is None:
        return list(trace)
    return [
        TraceRequest(each.arrival_s, min(each.prompt_tokens, longest_prompt), each.output_tokens, each.blocks)
        for each in trace
    ]


def run(
    args: argparse.Namespace, checkpoint: Checkpoint, class_name: str | None, jobs: Sequence[Job]
) -> dict[str, Any]:
    """Builds the runner, warms it up, drives the jobs through an engine and returns the report."""
    longest = max(len(job.prompt) + job.output_tokens for job in jobs)
    options = RunnerOptions(
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        dummy=args.dummy,
        max_sequences=args.slots,
        max_context_tokens=longest,
        max_plan_tokens=args.max_plan_tokens,
    )
    started = time.perf_counter()
    runner = build_runner(checkpoint, options, model=class_name)
    observed = ObservedRunner(runner)
    with Engine(observed, context_length=longest, prefix_cache=args.prefix_cache, overlap=args.overlap) as engine:
        runner.warm_up()
        print(f"ready after {time.perf_counter() - started:.1f} s; {runner.ledger}", file=sys.stderr)
        # What a first plan pays once is not the load's.
        drive(engine, [Job(0.0, jobs[0].prompt, 2)])
        observed.uses.clear()
        outcomes = drive(engine, jobs)
        config = engine.resolved.as_record()
        hits = engine.metrics.prefix_hit_tokens if engine.metrics is not None else 0
    report = summarise(outcomes)
    report["prefix_hit_tokens"] = hits
    report["config"] = config
    report["buckets"] = bucket_rows(observed.uses)
    return report


def print_buckets(report: dict[str, Any]) -> None:
    print(f"{'bucket':<24}{'plans':>8}{'s':>10}{'share':>8}{'ms':>10}{'fill':>8}")
    for row in report["buckets"]:
        name = f"{row['phase']} {row['tokens']} / {row['sequences']}"
        share = row["seconds"] / report["duration_s"]
        print(f"{name:<24}{row['plans']:>8}{row['seconds']:>10.2f}{share:>8.1%}{row['ms']:>10.2f}{row['fill']:>8.3f}")
    if "ideal_s" in report:
        print(f"at the sweep's rates: {report['ideal_s']:.1f} s, {report['ideal_s'] / report['duration_s']:.0%} of it")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a trace through an engine; 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench throughput", description=__doc__.splitlines()[0])
    add_model_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace",
        type=input_file,
        required=True,
        help="Mooncake .jsonl[.gz], Azure or Vidur .csv[.gz], or .json of [prompt, output] lengths",
    )
    load.add_argument("--limit", type=positive_int, help="first requests only (default all)")
    load.add_argument("--max-prompt-tokens", type=positive_int, help="longer prompts are cut (default: none)")
    load.add_argument("--max-output-tokens", type=positive_int, default=512, help="of one request (default 512)")
    load.add_argument("--length-scale", type=positive_float, default=1.0, help="factor on prompt and output lengths")
    times = load.add_mutually_exclusive_group()
    times.add_argument("--rate", type=positive_float, help="Poisson arrivals, requests a second (default: all at once)")
    times.add_argument("--scale", type=positive_float, help="the trace's own times, so many times faster")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--slots", type=positive_int, default=256, help="requests that run at once (default 256)")
    engine.add_argument("--max-plan-tokens", type=positive_int, help="prefill tokens a plan (default: the runner's)")
    engine.add_argument("--prefix-cache", action="store_true", help="share prefixes between requests")
    engine.add_argument("--overlap", type=int, default=1, help="plans in flight while the next is made (default 1)")
    output = parser.add_argument_group("output")
    output.add_argument("--sweep", type=input_file, nargs="+", help="results of `bench sweep`, for the ideal time")
    output.add_argument("--output", type=output_file, help="JSON lines to append the report to")
    output.add_argument("--commit", help="what the report calls the code; default: the checkout's commit")
    args = parser.parse_args(argv)
    check_model_arguments(parser, args)
    trace = cut_lengths(load_trace(args.trace)[: args.limit], args.max_prompt_tokens)
    choice = ModelChoice(args.model, args.shape, args.checkpoint, args.dummy)
    checkpoint = choice.open()
    try:
        jobs = build_jobs(
            trace,
            scale=args.scale or math.inf,
            length_scale=args.length_scale,
            max_output_tokens=args.max_output_tokens,
            vocab_size=read_model(checkpoint, choice.class_name)[1].vocab_size,
        )
        ideal = {}
        if args.sweep is not None:
            rows = [row for path in args.sweep for row in newest_rows(read_results(path))]
            ideal = {"ideal_s": ideal_seconds(rows, jobs, args.slots)}
        report = run(args, checkpoint, choice.class_name, arrivals_of(jobs, args.rate)) | ideal
    finally:
        checkpoint.close()
    print_report(report)
    print_buckets(report)
    if args.output is not None:
        known = {name: str(value) for name, value in vars(args).items() if name != "output" and value is not None}
        with args.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"arguments": known, **report, **describe_run(args.commit)}) + "\n")
    return int(report["completed"] < report["requests"])
