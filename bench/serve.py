"""`python -m bench serve URL --trace FILE`: drives a running OpenAI-compatible server with a request trace.

Prompts are token ids of the trace's lengths, with the trace's shared prefixes, sent to `/v1/completions` as streams at
the trace's times divided by `--scale`. Reports time to first token, gaps between tokens, whole latency and throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from bench.arguments import input_file, output_file, positive_float, positive_int
from bench.traces import BLOCK_TOKENS, TraceRequest, load_trace
from resin import InvalidRequest

PERCENTILES = (50, 90, 99)
FIRST_ID = 1000  # lower ids are special tokens in many vocabularies


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send: when, what, and how much to ask for."""

    at_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What became of a job; seconds since the run's start.

    Attributes:
        due_s, sent_s: when the trace wanted it, and when a connection was free.
        chunk_s: arrival of each piece of the answer.
        output_tokens: by the server's own count, else the number of pieces.
        error: None, or why it failed.
    """

    due_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def build_jobs(
    trace: Sequence[TraceRequest], *, scale: float, length_scale: float, max_output_tokens: int, vocab_size: int
) -> list[Job]:
    """Jobs of a trace, in order of time.

    Args:
        trace: the requests.
        scale: how much faster than the trace; infinity sends everything at once.
        length_scale: factor on prompt and output lengths.
        max_output_tokens: bound on outputs, after scaling.
        vocab_size: prompts use ids below it, in large vocabularies from 1000 on.
    """
    first_id = min(FIRST_ID, vocab_size // 2)
    jobs = []
    for number, request in enumerate(trace):
        length = max(1, round(request.prompt_tokens * length_scale))
        output = max(1, min(max_output_tokens, round(request.output_tokens * length_scale)))
        block_tokens = max(1, round(BLOCK_TOKENS * length_scale))
        # A trace without contents shares nothing: its blocks are numbered apart from every trace's.
        parts = range(-(-length // block_tokens))
        blocks = [(0, block) for block in request.blocks] or [(1 + number, part) for part in parts]
        ids: list[int] = []
        for block in blocks:
            if len(ids) >= length:
                break
            ids += np.random.default_rng(block).integers(first_id, vocab_size, block_tokens).tolist()
        jobs.append(Job(request.arrival_s / scale, ids[:length], output))
    return sorted(jobs, key=lambda job: job.at_s)


async def run_jobs(
    url: str, jobs: Sequence[Job], *, model: str, max_concurrency: int, api_key: str | None, timeout_s: float
) -> list[Outcome]:
    """Sends every job when it is due, at most `max_concurrency` at a time; outcomes in the order of the jobs."""
    gate = asyncio.Semaphore(max_concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)
    connector = aiohttp.TCPConnector(limit=max_concurrency)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        started = time.perf_counter()

        async def one(job: Job) -> Outcome:
            await asyncio.sleep(job.at_s - (time.perf_counter() - started))
            outcome = Outcome(job.at_s)
            async with gate:
                outcome.sent_s = time.perf_counter() - started
                try:
                    await _stream_job(session, url, model, job, outcome, started)
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    outcome.error = f"{type(error).__name__}: {error}"[:200]
            return outcome

        return list(await asyncio.gather(*map(one, jobs)))


async def _stream_job(
    session: aiohttp.ClientSession, url: str, model: str, job: Job, outcome: Outcome, started: float
) -> None:
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:150]}")
        async for event in _events(response):
            if "error" in event:
                raise ValueError(str(event["error"]))
            if event.get("choices"):
                outcome.chunk_s.append(time.perf_counter() - started)
            if event.get("usage"):
                outcome.prompt_tokens = event["usage"]["prompt_tokens"]
                outcome.output_tokens = event["usage"]["completion_tokens"]
    if not outcome.chunk_s:
        raise ValueError("the stream ended without a token")
    outcome.prompt_tokens = outcome.prompt_tokens or len(job.prompt)
    outcome.output_tokens = outcome.output_tokens or len(outcome.chunk_s)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        text = line.decode().strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text[5:])


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, throughput over the whole run, and percentiles in milliseconds."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = sorted({outcome.error for outcome in outcomes if outcome.error is not None})
    report: dict[str, Any] = {"requests": len(outcomes), "completed": len(done), "errors": errors[:10]}
    if not done:
        return report
    first, last = min(outcome.sent_s for outcome in done), max(outcome.chunk_s[-1] for outcome in done)
    duration_s = max(last - first, 1e-9)
    prompt, output = (sum(getattr(o, name) for o in done) for name in ("prompt_tokens", "output_tokens"))
    report |= {
        "duration_s": duration_s,
        "requests_per_s": len(done) / duration_s,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "prompt_tokens_per_s": prompt / duration_s,
        "output_tokens_per_s": output / duration_s,
    }
    gaps = [gap for outcome in done for gap in np.diff(outcome.chunk_s).tolist()]
    seconds = {
        "client_wait_ms": [outcome.sent_s - outcome.due_s for outcome in done],
        "ttft_ms": [outcome.chunk_s[0] - outcome.sent_s for outcome in done],
        "itl_ms": gaps,
        "latency_ms": [outcome.chunk_s[-1] - outcome.sent_s for outcome in done],
    }
    for name, values in seconds.items():
        if values:
            found = np.percentile(np.asarray(values) * 1000, PERCENTILES).tolist()
            report[name] = dict(zip((f"p{q}" for q in PERCENTILES), found, strict=True))
    return report


def print_report(report: dict[str, Any]) -> None:
    print(f"{report['completed']} of {report['requests']} requests completed")
    for error in report["errors"]:
        print(f"  {error}")
    if not report["completed"]:
        return
    print(
        f"{report['duration_s']:.1f} s: {report['requests_per_s']:.2f} requests/s, "
        f"{report['prompt_tokens_per_s']:.0f} prompt and {report['output_tokens_per_s']:.0f} output tokens/s"
    )
    print(f"{'ms':<16}" + "".join(f"{f'p{q}':>10}" for q in PERCENTILES))
    for name in ("client_wait_ms", "ttft_ms", "itl_ms", "latency_ms"):
        if name in report:
            print(f"{name.removesuffix('_ms'):<16}" + "".join(f"{value:>10.1f}" for value in report[name].values()))


async def first_model(url: str, api_key: str | None) -> str:
    """The first name that the server lists.

    Raises:
        InvalidRequest: no server, or one that lists none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest("url", url, f"a server that lists its models at /v1/models ({error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a trace against a server; 1 if a request failed."""
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="for example http://127.0.0.1:8000")
    parser.add_argument(
        "--trace", type=input_file, required=True, help="Mooncake .jsonl[.gz], Azure or Vidur .csv[.gz]"
    )
    parser.add_argument(
        "--scale", type=positive_float, default=1.0, help="times faster than the trace; inf sends all at once"
    )
    parser.add_argument("--length-scale", type=positive_float, default=1.0, help="factor on prompt and output lengths")
    parser.add_argument("--limit", type=positive_int, default=100, help="requests of the trace to send (default 100)")
    parser.add_argument("--max-concurrency", type=positive_int, default=64, help="requests open at once (default 64)")
    parser.add_argument("--max-output-tokens", type=positive_int, default=1024, help="of one request (default 1024)")
    parser.add_argument(
        "--vocab-size", type=positive_int, default=32000, help="prompts use ids below it (default 32000)"
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument(
        "--timeout-s", type=positive_float, default=300.0, help="longest silence of a stream (default 300)"
    )
    parser.add_argument("--output", type=output_file, help="JSON report to write")
    args = parser.parse_args(argv)
    report = asyncio.run(_run(args))
    print_report(report)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["completed"] < report["requests"])


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    url = args.url.rstrip("/").removesuffix("/v1")
    trace = load_trace(args.trace)[: args.limit]
    model = args.model or await first_model(url, args.api_key)
    jobs = build_jobs(
        trace,
        scale=args.scale,
        length_scale=args.length_scale,
        max_output_tokens=args.max_output_tokens,
        vocab_size=args.vocab_size,
    )
    print(f"{len(jobs)} requests to {url}, model {model}", file=sys.stderr)
    outcomes = await run_jobs(
        url,
        jobs,
        model=model,
        max_concurrency=args.max_concurrency,
        api_key=args.api_key,
        timeout_s=args.timeout_s,
    )
    described = {name: str(value) for name, value in vars(args).items() if name not in ("api_key", "output")}
    return {"model": model, "arguments": described, **summarise(outcomes)}
