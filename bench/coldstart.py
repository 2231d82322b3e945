"""`python -m bench coldstart`: from process start to first token, by phase, over a whole deployment's bucket table.

Each run is a new process. The first one may fill the compile cache; the later ones show a warm start.

    python -m bench coldstart --shape llama-3.1-8b --max-sequences 512
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arguments import output_file, positive_int

# No jax up here: importing it is the first phase that is timed.
PHASES = ("python", "import", "device", "config", "compile", "weights", "first token")
PROMPT_TOKENS = 128


def main(argv: Sequence[str]) -> int:
    """Starts the runs one after another and prints a column a run."""
    args = parse_arguments(argv)
    if args.started_at is not None:
        print(json.dumps(start_once(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="resin-programs-") as fresh:
        runs = [_run_child(argv, args.compile_cache or Path(fresh)) for _ in range(args.runs)]
    print_report(runs)
    if args.output is not None:
        args.output.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    return 0


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench coldstart", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="registered name, path, hub id, or package.module:Name")
    parser.add_argument("--shape", help="config of a published model, with random weights")
    parser.add_argument("--checkpoint", help="weights of --model")
    parser.add_argument(
        "--max-sequences", type=positive_int, default=512, help="sequences at once, which the table follows"
    )
    parser.add_argument("--max-context-tokens", type=int, help="default: the runner's")
    parser.add_argument("--cache-bytes", type=int, help="bytes of the arena; default: the runner's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--runs", type=positive_int, default=2, help="starts, one after another (default 2)")
    parser.add_argument(
        "--compile-cache", type=Path, help="directory that is kept; default: a fresh one, removed again"
    )
    parser.add_argument("--output", type=output_file, help="JSON report to write")
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not (args.model or args.shape or args.checkpoint):
        parser.error("one of --model, --shape and --checkpoint is needed")
    return args


def _run_child(arguments: Sequence[str], compile_cache: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", "coldstart", *arguments, "--compile-cache", str(compile_cache)]
    run = subprocess.run([*command, "--started-at", repr(time.time())], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        raise SystemExit(run.returncode)  # the child has said why
    report: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return report


class Stopwatch:
    """Seconds of each phase, one after another since the process was started."""

    def __init__(self, started_at: float) -> None:
        self.phases_s: dict[str, float] = {}
        self._last = started_at

    def stop(self, phase: str) -> None:
        """Ends a phase; the next one starts now."""
        now = time.time()
        self.phases_s[phase] = now - self._last
        self._last = now


def start_once(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that a server does before its first token, in this process."""
    watch = Stopwatch(args.started_at)
    watch.stop("python")
    import jax
    import numpy as np

    from bench.model_setup import ModelChoice
    from resin import Engine, SamplingParams
    from resin.runtime import RunnerOptions, build_runner

    watch.stop("import")
    jax.devices()
    watch.stop("device")
    is_dummy = args.checkpoint is None and args.shape is not None
    choice = ModelChoice(args.model, args.shape, args.checkpoint, is_dummy)
    checkpoint = choice.open()
    options = RunnerOptions(
        dtype=args.dtype,
        dummy=is_dummy,
        max_sequences=args.max_sequences,
        max_context_tokens=args.max_context_tokens,
        cache_bytes=args.cache_bytes,
        compile_cache=args.compile_cache,
    )
    runner = build_runner(checkpoint, options, model=choice.class_name)
    watch.stop("config")
    with Engine(runner) as engine:
        runner.compile()
        watch.stop("compile")
        runner.warm_up()
        jax.block_until_ready(runner.weights)
        watch.stop("weights")
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, runner.config.vocab_size, min(PROMPT_TOKENS, engine.context_length - 2))
        request = engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=1))
        while not request.output_ids:
            engine.step()
        watch.stop("first token")
    return {
        "phases_s": watch.phases_s,
        "total_s": sum(watch.phases_s.values()),
        "executables": int(runner.observations()["executables"]),
        "ledger": str(runner.ledger),
        "peak_bytes": (runner.device.memory_stats() or {}).get("peak_bytes_in_use"),
        "jax": jax.__version__,
        "device": runner.device.device_kind,
    }


def print_report(runs: Sequence[dict[str, Any]]) -> None:
    """A line a phase, a column a run."""
    print(f"{runs[0]['device']}, jax {runs[0]['jax']}, {runs[0]['executables']} executables; {runs[0]['ledger']}")
    print(f"{'seconds':<14}" + "".join(f"{f'run {number}':>9}" for number in range(1, len(runs) + 1)))
    for phase in PHASES:
        print(f"{phase:<14}" + "".join(f"{run['phases_s'][phase]:>9.2f}" for run in runs))
    print(f"{'total':<14}" + "".join(f"{run['total_s']:>9.2f}" for run in runs))
