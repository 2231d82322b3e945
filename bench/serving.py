"""What the HTTP server costs: many streams over a runner of fixed step time, against the bare engine.

    python -m bench serving [--streams 256] [--tokens 1000] [--step-ms 4] [--runs 3] [--output REPORT.json]
    python -m bench serving --memory-minutes 10

The client runs in a process of its own. A token's text is the number of the step that made it, so its latency is known
from both clocks, which are one on one machine: from the end of the runner's step to the arrival of its text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.arguments import output_file, positive_float, positive_int
from resin import BatchPlan, Engine, ForwardOutput, RunnerConfig, SamplingParams
from resin.recipes import Message, Parser, Tool
from resin.recipes.tagged import TaggedParser, Tags
from serve import HttpServer, ServerConfig


class StepNumberTokenizer:
    """Token n reads "n " ."""

    vocab_size = 1 << 22
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    controls: Mapping[str, int] = MappingProxyType({})
    chat_template: str | None = None
    tool_template: str | None = None
    named_tokens: Mapping[str, str] = MappingProxyType({})

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return [1] * max(1, len(text))

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        return [1] * max(1, len(parts))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.id_to_bytes, ids)).decode()

    def token_to_id(self, token: str) -> int | None:
        return None

    def id_to_token(self, token_id: int) -> str | None:
        return str(token_id)

    def id_to_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


class PlainRecipe:
    """Every conversation is a prompt of a few tokens."""

    stop_token_ids: tuple[int, ...] = ()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **options: Any) -> list[int]:
        return [1, 2, 3, 4]

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        return TaggedParser(StepNumberTokenizer(), Tags(), prompt_ids)


class FixedStepRunner:
    """Takes `step_s` for every plan and emits the step's number in every row."""

    def __init__(self, step_s: float, streams: int) -> None:
        self.config = RunnerConfig(vocab_size=StepNumberTokenizer.vocab_size, max_sequences=streams)
        self.tokenizer = StepNumberTokenizer()
        self.step_s = step_s
        self.steps = 0
        self.forget()

    def forget(self) -> None:
        """Drops what was noted of the steps so far."""
        self.rows: list[int] = []
        self.ends_s: list[float] = []
        self.cpu_s: list[float] = []  # of the engine's thread, at the end of each step

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        if self.step_s:
            time.sleep(self.step_s)
        rows = plan.num_sequences
        output = ForwardOutput(np.full(rows, self.steps, np.int32), np.arange(rows + 1))
        self.steps += 1
        self.rows.append(rows)
        self.cpu_s.append(time.thread_time())
        self.ends_s.append(time.perf_counter())
        return output

    def full_steps(self) -> tuple[int, int]:
        """First and last step in which every stream ran."""
        full = np.flatnonzero(np.asarray(self.rows) == max(self.rows))
        return int(full[0]), int(full[-1])

    def lost_ms_per_step(self) -> float:
        """How much longer than its own work and the fixed time a step took: waits for interpreter or core."""
        first, last = self.full_steps()
        taken_s = self.ends_s[last] - self.ends_s[first] - (self.cpu_s[last] - self.cpu_s[first])
        return (taken_s / (last - first) - self.step_s) * 1e3


def measure_engine(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    """Tokens/s of the engine alone."""
    runner = FixedStepRunner(step_s, streams)
    with Engine(runner) as engine:
        for _ in range(streams):
            engine.submit([1, 2, 3, 4], sampling_params=SamplingParams(max_output_tokens=tokens))
        while engine.has_work():
            engine.step()
    first, last = runner.full_steps()
    rate = streams * (last - first) / (runner.ends_s[last] - runner.ends_s[first])
    return {"engine_tokens_per_s": rate, "engine_lost_ms_per_step": runner.lost_ms_per_step()}


@contextmanager
def running_server(runner: FixedStepRunner, streams: int) -> Iterator[str]:
    """A server in this process, by its address."""
    config = ServerConfig(port=0, max_active_sessions=streams)
    server = HttpServer(Engine(runner), recipe=PlainRecipe(), model="steps", config=config)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        if not server.wait_ready(10):
            raise RuntimeError("the server did not start")
        yield server.url
    finally:
        server.shutdown()
        thread.join()


def client_command(url: str, streams: int, tokens: int) -> list[str]:
    """Starts a client that reads all streams to their ends."""
    return [sys.executable, "-m", "bench.serving_client", url, str(streams), str(tokens)]


def measure_server(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    """Tokens/s and latencies over HTTP."""
    runner = FixedStepRunner(step_s, streams)
    cpu_started_s = time.process_time()
    with running_server(runner, streams) as url:
        command = client_command(url, streams, tokens)
        client = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    cpu_s = time.process_time() - cpu_started_s
    arrivals = np.asarray(client["arrivals"])
    latencies_ms = (arrivals[:, 1] - np.asarray(runner.ends_s)[arrivals[:, 0].astype(int)]) * 1e3
    return {
        "tokens_per_s": client["tokens_per_s"],
        "tokens_per_event": client["tokens"] / client["events"],
        "server_cpu_us_per_token": cpu_s * 1e6 / client["tokens"],
        "client_cpu_us_per_token": client["cpu_s"] * 1e6 / client["tokens"],
        "lost_ms_per_step": runner.lost_ms_per_step(),
        "added_latency_p50_ms": float(np.percentile(latencies_ms, 50)),
        "added_latency_p99_ms": float(np.percentile(latencies_ms, 99)),
    }


def measure_memory(streams: int, tokens: int, step_s: float, minutes: float) -> dict[str, Any]:
    """Resident memory of the serving process after each of the clients that follow one another.

    The slope leaves out the first minute, or half the time if that is less.
    """
    runner = FixedStepRunner(step_s, streams)
    started_s = time.monotonic()
    samples: list[tuple[float, float]] = []  # minutes and MB
    with running_server(runner, streams) as url:
        while not samples or samples[-1][0] < minutes:
            subprocess.run(client_command(url, streams, tokens), stdout=subprocess.DEVNULL, check=True)
            runner.forget()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            samples.append(((time.monotonic() - started_s) / 60, pages * os.sysconf("SC_PAGE_SIZE") / 1e6))
    late = np.asarray([sample for sample in samples if sample[0] >= min(1.0, minutes / 2)])
    slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) if len(late) > 1 else 0.0
    return {"minutes": samples[-1][0], "clients": len(samples), "last_mb": samples[-1][1], "mb_per_minute": slope}


def measure(streams: int, tokens: int, step_s: float, runs: int) -> dict[str, Any]:
    """Engine and server by turns, `runs` times: the medians, and the server's share of each run."""
    found = []
    for _ in range(runs):
        run = measure_engine(streams, tokens, step_s) | measure_server(streams, tokens, step_s)
        found.append(run | {"share": run["tokens_per_s"] / run["engine_tokens_per_s"]})
    medians: dict[str, Any] = {name: statistics.median(run[name] for run in found) for name in found[0]}
    return medians | {"shares": [run["share"] for run in found]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=positive_int, default=256, help="at once; default %(default)s")
    parser.add_argument("--tokens", type=positive_int, default=1000, help="of each; default %(default)s")
    parser.add_argument("--step-ms", type=float, default=4.0, help="time of a step; default %(default)s")
    parser.add_argument("--runs", type=positive_int, default=3, help="of which the median counts; default %(default)s")
    parser.add_argument("--output", type=output_file, help="JSON report to write")
    parser.add_argument("--memory-minutes", type=positive_float, help="measure memory for that long instead of speed")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens}
    if args.memory_minutes is not None:
        found = report["memory"] = measure_memory(args.streams, args.tokens, args.step_ms / 1e3, args.memory_minutes)
        print(_MEMORY.format(**found))
    # Without a step time a stream is over before many others are let in, unless it is longer.
    cases = () if args.memory_minutes is not None else ((args.step_ms / 1e3, args.tokens), (0.0, args.tokens * 10))
    for step_s, tokens in cases:
        name, load = f"step {step_s * 1e3:g} ms", os.getloadavg()[0]
        found = report[name] = measure(args.streams, tokens, step_s, args.runs) | {"load_average": load}
        print(_TEXT.format(name=name, each=", ".join(f"{share:.3f}" for share in found["shares"]), **found))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


_MEMORY = (
    "{last_mb:.0f} MB after {clients} clients in {minutes:.1f} minutes, {mb_per_minute:+.2f} MB a minute at the end"
)
_TEXT = """{name}: engine {engine_tokens_per_s:,.0f} tokens/s, server {tokens_per_s:,.0f} ({share:.3f} of it; {each})
  {tokens_per_event:.1f} tokens an event, added latency p50 {added_latency_p50_ms:.1f} ms, \
p99 {added_latency_p99_ms:.1f} ms
  CPU a token: server {server_cpu_us_per_token:.1f} us, client {client_cpu_us_per_token:.1f} us; \
a step waits {lost_ms_per_step:.2f} ms (alone {engine_lost_ms_per_step:.2f}); load average {load_average:.1f}"""


if __name__ == "__main__":
    main()
