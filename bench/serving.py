"""What the HTTP server costs: many streams over a runner of fixed step time, against the bare engine.

    python -m bench.serving [--streams 256] [--tokens 1000] [--step-ms 4] [--output REPORT.json]

The client runs in a process of its own. A token's text is the number of the step that made it, so its latency is known
from both clocks, which are one on one machine: from the end of the runner's step to the arrival of its text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

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
    chat_template: str | None = None

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return [1] * max(1, len(text))

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
        self.step_ends: list[float] = []
        self._step_s = step_s

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        if self._step_s:
            time.sleep(self._step_s)
        rows = plan.num_sequences
        output = ForwardOutput(np.full(rows, len(self.step_ends), np.int32), np.arange(rows + 1))
        self.step_ends.append(time.perf_counter())
        return output


def measure_engine(streams: int, tokens: int, step_s: float) -> float:
    """Tokens/s of the engine alone."""
    with Engine(FixedStepRunner(step_s, streams)) as engine:
        for _ in range(streams):
            engine.submit([1, 2, 3, 4], sampling_params=SamplingParams(max_output_tokens=tokens))
        started = time.perf_counter()
        while engine.has_work():
            engine.step()
        return streams * tokens / (time.perf_counter() - started)


def measure_server(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    """Tokens/s and latencies over HTTP."""
    runner = FixedStepRunner(step_s, streams)
    config = ServerConfig(port=0, max_active_sessions=streams)
    server = HttpServer(Engine(runner), recipe=PlainRecipe(), model="steps", config=config)
    thread = threading.Thread(target=server.serve)
    cpu_started_s = time.process_time()
    thread.start()
    try:
        if not server.wait_ready(10):
            raise RuntimeError("the server did not start")
        command = [sys.executable, "-m", "bench.serving", "--client", server.url]
        command += ["--streams", str(streams), "--tokens", str(tokens)]
        client = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    finally:
        server.shutdown()
        thread.join()
    cpu_us = (time.process_time() - cpu_started_s) * 1e6
    arrivals = np.asarray(client["arrivals"])
    latencies_ms = (arrivals[:, 1] - np.asarray(runner.step_ends)[arrivals[:, 0].astype(int)]) * 1e3
    return {
        "tokens_per_s": client["tokens_per_s"],
        "tokens_per_event": client["tokens"] / client["events"],
        "cpu_us_per_token": cpu_us / client["tokens"],
        "added_latency_p50_ms": float(np.percentile(latencies_ms, 50)),
        "added_latency_p99_ms": float(np.percentile(latencies_ms, 99)),
    }


async def run_client(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """Opens all streams and reads them to their ends."""
    place = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    arrivals: list[tuple[int, float]] = []
    firsts: list[float] = []
    lasts: list[float] = []
    events = 0

    async def read_stream() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head.encode() + body)
        is_first = True
        now = 0.0
        while line := await reader.readline():
            if not line.startswith(b'data: {"id"'):
                continue
            numbers = json.loads(line[6:])["choices"][0]["delta"].get("content", "").split()
            if numbers:
                now = time.perf_counter()
                if is_first:
                    firsts.append(now)
                is_first = False
                events += 1
                arrivals.extend((int(number), now) for number in numbers)
        lasts.append(now)
        writer.close()

    await asyncio.gather(*(read_stream() for _ in range(streams)))
    if len(arrivals) != streams * tokens:
        raise RuntimeError(f"{len(arrivals)} tokens arrived, expected {streams * tokens}")
    # Rates count only while every stream runs: streams are let in four a step, and end one after another.
    begin_s, end_s = max(firsts), min(lasts)
    steady = [arrival for arrival in arrivals if begin_s <= arrival[1] < end_s]
    if len(steady) < len(arrivals) / 2:  # too short for that: the whole time instead
        begin_s, end_s, steady = min(firsts), max(lasts), arrivals
    return {
        "tokens": len(arrivals),
        "events": events,
        "tokens_per_s": len(steady) / (end_s - begin_s),
        "arrivals": steady[:: max(1, len(steady) // 100_000)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(run_client(args.client, args.streams, args.tokens))))
        return
    report: dict[str, Any] = {"streams": args.streams, "tokens": args.tokens}
    for name, step_s in ((f"step {args.step_ms:g} ms", args.step_ms / 1e3), ("step 0 ms", 0.0)):
        engine = measure_engine(args.streams, args.tokens, step_s)
        server = measure_server(args.streams, args.tokens, step_s)
        report[name] = {"engine_tokens_per_s": engine, "share": server["tokens_per_s"] / engine, **server}
        print(
            f"{name}: engine {engine:,.0f} tokens/s, server {server['tokens_per_s']:,.0f} "
            f"({report[name]['share']:.3f} of it), {server['tokens_per_event']:.1f} tokens an event, "
            f"{server['cpu_us_per_token']:.1f} us of CPU a token, added latency p50 "
            f"{server['added_latency_p50_ms']:.1f} ms, p99 {server['added_latency_p99_ms']:.1f} ms"
        )
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
