"""`python -m bench sweep`: prefill and decode over batch sizes and context lengths, with the fraction of the limit.

Each case is checked, then timed as a resident plan (docs/benchmarking.md has the protocol); `--engine` adds the same
decode through Engine.submit and Engine.step. One JSON line a case goes to `--output`.

    python -m bench sweep --shape llama-3.1-8b --dummy --context-lengths 1024 --batch-sizes 1,8,32,128 --engine
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from bench.arguments import output_file, positive_float, positive_int, sizes
from bench.cases import Case, resident_plan
from bench.driven import Driven, drive, slack_tokens
from bench.kernel_count import count_kernels
from bench.model_setup import ModelChoice, Setup, add_model_arguments, build_setup, check_model_arguments
from bench.provenance import describe_run
from bench.resident import ResidentCase, fill_with_noise, time_rounds, trace
from bench.roofline import CeilingProbe, Ceilings, Work, WorkCounter
from bench.step_check import PlainForward, check_repeatable, check_tokens
from resin import InvalidRequest, Phase, SamplingParams
from resin.plan.cache import FP8_DTYPE, fp8_scales
from resin.plan.extras import require
from resin.runtime import RunnerOptions
from resin.runtime.options import KERNELS
from resin.runtime.program_kind import plan_kind


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench sweep",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = add_model_arguments(parser)
    model.add_argument("--balanced-experts", action="store_true", help="tokens take experts in turn")
    model.add_argument("--kernels", choices=KERNELS, help="default: triton on GPU, reference on CPU")
    model.add_argument("--paged-prefill", action="store_true", help="fresh prompts take the paged kernel, not cuDNN")
    cases = parser.add_argument_group("cases")
    cases.add_argument("--context-lengths", type=sizes, default=(1024,), help="tokens a sequence, comma-separated")
    cases.add_argument("--batch-sizes", type=sizes, default=(1, 8, 32, 128), help="sequences, comma-separated")
    cases.add_argument("--phases", type=_phases, default=(Phase.DECODE,), help="decode,prefill")
    cases.add_argument(
        "--max-prefill-tokens", type=positive_int, default=8192, help="larger prefill cases are left out"
    )
    cases.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    cases.add_argument("--top-k", type=int, default=0, help="0 keeps all")
    cases.add_argument("--top-p", type=float, default=1.0, help="1 keeps all")
    timing = parser.add_argument_group("timing")
    timing.add_argument("--rounds", type=positive_int, default=7, help="repeats, of which the median counts")
    timing.add_argument(
        "--burst-s", type=positive_float, default=0.2, help="seconds of queued launches a round and case"
    )
    timing.add_argument("--engine", action="store_true", help="also drive decode through the Engine")
    timing.add_argument("--overlap", type=int, default=1, help="plans that the Engine keeps in flight (1)")
    timing.add_argument("--engine-steps", type=positive_int, default=32, help="engine steps a round")
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=output_file, help="JSON lines to append to")
    output.add_argument("--trace-dir", type=Path, help="a Perfetto trace of each case")
    output.add_argument("--plot", action="store_true", help="charts beside --output")
    output.add_argument("--commit", help="what the rows call the code; default: the checkout's commit")
    args = parser.parse_args(argv)
    check_model_arguments(parser, args)
    if args.plot and args.output is None:
        parser.error("--plot draws what --output holds")
    if args.plot:
        require("plot")
    return args


def _phases(text: str) -> tuple[Phase, ...]:
    try:
        return tuple(Phase[part.strip().upper()] for part in text.split(","))
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text}: decode, prefill or both") from None


def build_cases(args: argparse.Namespace) -> list[Case]:
    """Every phase, context and batch size that is asked for, prefill within its limit.

    Raises:
        InvalidRequest: nothing is left.
    """
    cases = []
    for phase in args.phases:
        for context in args.context_lengths:
            slack = slack_tokens(context, args.rounds, args.engine_steps) if args.engine else 0
            for sequences in args.batch_sizes:
                if phase is Phase.DECODE:
                    cases.append(Case(phase, sequences, context, slack))
                elif sequences * context <= args.max_prefill_tokens:
                    cases.append(Case(phase, sequences, context))
                else:
                    print(f"left out: prefill {sequences}x{context}, beyond --max-prefill-tokens", file=sys.stderr)
    if not cases:
        raise InvalidRequest("max_prefill_tokens", args.max_prefill_tokens, "room for at least one case")
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep and prints one line a case."""
    args = parse_arguments(argv)
    cases = build_cases(args)
    choice = ModelChoice(args.model, args.shape, args.checkpoint, args.dummy, args.balanced_experts)
    started = time.perf_counter()
    options = RunnerOptions(
        dtype=args.dtype,
        kernels=args.kernels,
        kv_dtype=args.kv_dtype,
        fresh_attention="paged" if args.paged_prefill else "cudnn",
    )
    setup = build_setup(choice, cases, options)
    print(f"ready after {time.perf_counter() - started:.1f} s; {setup.runner.ledger}", file=sys.stderr)
    rows = run_cases(args, cases, setup, choice)
    if args.output is not None:
        with args.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    if args.plot:
        from bench.plot import plot_results

        for path in plot_results(args.output):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def run_cases(
    args: argparse.Namespace, cases: Sequence[Case], setup: Setup, choice: ModelChoice
) -> list[dict[str, Any]]:
    """Checks every case, then times all of them in turns; prints and returns one row a case."""
    runner, config = setup.runner, setup.spec.config
    params = SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    scales, longest = fp8_scales(config.groups), config.max_context_tokens
    plain = PlainForward(setup.spec.model, setup.weights, setup.spec.dtype, scales, longest)
    counter = WorkCounter(setup.spec.model, config, balanced=args.balanced_experts)
    plans = [resident_plan(case, config, setup.num_pages, params) for case in cases]
    memory = memory_use(setup)
    checks = []
    fill_with_noise(runner)
    for case, plan in zip(cases, plans, strict=True):
        # Balanced experts are chosen by a token's place in the batch, which the plain forward does not share.
        checks.append(None if args.balanced_experts else check_tokens(case, runner, plain, setup.num_pages))
        check_repeatable(case, runner, plan)
    # Short requests left their own keys in the arena.
    fill_with_noise(runner)
    memory |= peak_memory(setup)
    residents = [ResidentCase(plan) for plan in plans]
    probe = CeilingProbe(setup.spec.dtype)
    time_rounds(runner, residents, probe, rounds=args.rounds, burst_target_s=args.burst_s)
    ceilings, about = probe.settled(), describe_run(args.commit)
    print_header(ceilings)
    rows = []
    for case, resident, check in zip(cases, residents, checks, strict=True):
        driven = None
        if args.engine and case.phase is Phase.DECODE:
            window = {
                "num_pages": setup.num_pages,
                "rounds": args.rounds,
                "steps": args.engine_steps,
                "overlap": args.overlap,
            }
            driven = drive(case, runner, resident.plan, params, **window)
        row = case_row(case, resident, driven, counter.count(resident.plan), ceilings, setup)
        row |= {"model": choice.name, "weights": "random" if args.dummy else "checkpoint"}
        row |= {"check_error": None if check is None else check.engine[-1]}
        row |= {} if check is None else {"check": check.engine.tolist(), "check_plain": check.plain.tolist()}
        row |= {"overlap": args.overlap} if driven is not None else {}
        row |= {"sampling": {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}}
        row |= {"balanced_experts": args.balanced_experts, **memory, **about}
        print_row(row)
        rows.append(row)
        if args.trace_dir is not None:
            trace(runner, resident.plan, args.trace_dir / str(case).replace(" ", "-"))
    compiled_late = runner.observations()["compilations_after_ready"]
    if compiled_late:
        raise RuntimeError(f"{compiled_late:.0f} programs were compiled after the runner was ready")
    return rows


def case_row(
    case: Case, resident: ResidentCase, driven: Driven | None, work: Work, ceilings: Ceilings, setup: Setup
) -> dict[str, Any]:
    """What was measured and counted of one case."""
    step_s, plan = resident.median_ms / 1000, resident.plan
    tokens = case.sequences * (case.context_tokens if case.phase is Phase.PREFILL else 1)
    row: dict[str, Any] = {
        "phase": case.phase.name.lower(),
        "sequences": case.sequences,
        "context_tokens": case.context_tokens,
        "bucket": str(plan.bucket),
        "program": plan_kind(plan, setup.spec.kinds(plan.bucket)).value,
        "paged_prefill": not setup.spec.has_fresh_prefill,
        "dtype": setup.spec.dtype,
        "cache_dtype": FP8_DTYPE if fp8_scales(setup.spec.config.groups) else setup.spec.config.arena_dtype,
        "ms": resident.median_ms,
        "ms_rounds": resident.step_ms,
        "launches": resident.launches,
        "tokens_per_s_per_gpu": tokens / step_s,
        "tokens_per_s_per_user": tokens / case.sequences / step_s,
        "host_call_ms": float(sorted(resident.call_ms)[len(resident.call_ms) // 2]),
        "kernel_backend": setup.spec.kernels().backend.value,
        "kernels": count_kernels(setup.runner.executable(plan).as_text() or ""),
        "plan_bytes": plan.buffer.nbytes,
        "bytes": work.nbytes,
        "flops": work.flops,
        "work": asdict(work),
        **asdict(ceilings),
        "limit_ms": work.limit_s(ceilings) * 1000,
        "limit_fraction": work.limit_s(ceilings) / step_s,
        "bandwidth_fraction": work.nbytes / step_s / ceilings.copy_bytes_per_s,
        "matmul_fraction": work.flops / step_s / ceilings.matmul_flops_per_s,
    }
    if driven is not None:
        row |= {"engine_ms": driven.median_ms, "engine_ratio": driven.ratio}
        row |= {"engine_ms_rounds": driven.engine_ms, "engine_bare_ms_rounds": driven.bare_ms}
    return row


def memory_use(setup: Setup) -> dict[str, Any]:
    """The runner's ledger."""
    ledger = setup.runner.ledger
    assert ledger is not None
    return {"ledger_bytes": ledger.total, "ledger": asdict(ledger)}


def peak_memory(setup: Setup) -> dict[str, int]:
    """The most that the device held so far, where it says."""
    stats = setup.runner.device.memory_stats() or {}
    return {"peak_bytes": int(stats["peak_bytes_in_use"])} if "peak_bytes_in_use" in stats else {}


def print_header(ceilings: Ceilings) -> None:
    print(
        f"{jax.devices()[0].device_kind}: copy {ceilings.copy_bytes_per_s / 1e12:.3f} TB/s, "
        f"matrix product {ceilings.matmul_flops_per_s / 1e12:.1f} TFLOP/s"
    )
    print(
        f"{'case':<18}{'ms':>9}{'spread':>8}{'limit':>8}{'of limit':>9}{'tok/s/GPU':>11}{'call ms':>9}{'kernels':>9}"
        f"{'engine ms':>11}{'ratio':>7}{'check':>9}"
    )


def print_row(row: dict[str, Any]) -> None:
    spread = (max(row["ms_rounds"]) - min(row["ms_rounds"])) / row["ms"]
    case = f"{row['phase']} {row['sequences']}x{row['context_tokens']}"
    engine = f"{row['engine_ms']:11.3f}{row['engine_ratio']:7.3f}" if "engine_ms" in row else f"{'':18}"
    error = f"{row['check_error']:.4f}" if row["check_error"] is not None else "repeat"
    print(
        f"{case:<18}{row['ms']:9.3f}{spread:8.1%}{row['limit_ms']:8.3f}{row['limit_fraction']:9.1%}"
        f"{row['tokens_per_s_per_gpu']:11.0f}{row['host_call_ms']:9.3f}{row['kernels']:9d}{engine}{error:>9}",
        flush=True,
    )
