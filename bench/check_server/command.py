"""Command line, and the list of all checks."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import aiohttp

from bench.arguments import input_file, output_file
from bench.check_server import abilities, context, correctness, errors, evaluation, streaming, stress
from bench.check_server.api import Api
from bench.check_server.outcome import Figures, Result, Status, run_check
from bench.check_server.report import line, summary, write_report
from bench.serve import first_model
from resin import InvalidRequest


class Check(NamedTuple):
    """One check: its names, and what it does with a server."""

    group: str
    name: str
    work: Callable[[Api, Figures], Awaitable[None]]


def all_checks(args: argparse.Namespace) -> list[Check]:
    """Every check that the arguments ask for, in the order in which they run."""
    found = [
        Check("correctness", "models", correctness.check_models),
        Check("correctness", "chat", correctness.check_chat),
        Check("correctness", "completions", correctness.check_completions),
        Check("correctness", "greedy answers repeat", correctness.check_repeatability),
        Check("correctness", "stop string", correctness.check_stop_string),
        Check("correctness", "max_tokens", correctness.check_max_tokens),
        Check("correctness", "usage", correctness.check_usage),
        Check("correctness", "choices", correctness.check_choices),
        Check("correctness", "logprobs", correctness.check_logprobs),
        Check("correctness", "json schema", abilities.check_schema),
        Check("errors", "broken JSON", errors.check_broken_json),
        Check("errors", "missing field", errors.check_missing_field),
        Check("errors", "wrong type", errors.check_wrong_type),
        Check("errors", "unknown model", errors.check_unknown_model),
        Check("errors", "unknown path", errors.check_unknown_path),
        Check("errors", "API key", errors.check_api_key),
        Check("errors", "malformed bodies", errors.check_malformed_bodies),
        Check("errors", "prompt too long", errors.check_long_prompt),
        Check("streaming", "equals whole answer", streaming.check_stream_equals_whole),
        Check("streaming", "completions", streaming.check_completion_stream),
        Check("streaming", "form", streaming.check_stream_form),
        Check("streaming", "gradual", streaming.check_stream_is_gradual),
        Check("streaming", "usage", streaming.check_stream_usage),
        Check("streaming", "whole characters", streaming.check_characters),
        Check("streaming", "stop string", streaming.check_streamed_stop),
        Check("prefix cache", "reuse", context.check_prefix_reuse),
        Check("prefix cache", "same answer", context.check_prefix_answer),
        Check("prefix cache", "first token", context.check_prefix_time),
        Check("first token", "by prompt size", partial(context.check_first_token_times, sizes=args.context_sizes)),
    ]
    if args.tools:
        found += [
            Check("tools", "call", abilities.check_tool_call),
            Check("tools", "streamed call", abilities.check_streamed_tool_call),
            Check("tools", "result", abilities.check_tool_result),
        ]
    if args.reasoning:
        found.append(Check("reasoning", "apart from the answer", abilities.check_reasoning))
    if args.eval_file is not None:
        items = evaluation.read_items(args.eval_file, args.limit)
        settings = evaluation.Settings(
            concurrency=args.concurrency,
            answer_tokens=abilities.THINKING_TOKENS if args.reasoning else 8,
            min_accuracy=args.min_accuracy,
            reference=evaluation.read_reference(args.eval_reference) if args.eval_reference else {},
        )
        work = partial(evaluation.check_evaluation, items=items, settings=settings)
        found.append(Check("evaluation", args.eval_file.name, work))
    found += [
        Check("stress", "burst", partial(stress.check_burst, concurrency=args.concurrency)),
        Check("stress", "disconnects", partial(stress.check_disconnects, concurrency=args.concurrency)),
        Check("stress", "health", stress.check_health),
    ]
    return found


def chosen_checks(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """The checks of the named groups, or named `group: check`; all without names.

    Raises:
        InvalidRequest: a name that fits none.
    """
    names = {check.group for check in checks} | {f"{check.group}: {check.name}" for check in checks}
    for name in only:
        if name not in names:
            raise InvalidRequest("only", name, f"one of {', '.join(sorted(names))}")
    return [check for check in checks if not only or {check.group, f"{check.group}: {check.name}"} & set(only)]


async def run_checks(api: Api, checks: Sequence[Check], show: Callable[[Result], None]) -> list[Result]:
    """Runs the checks one after another."""
    results = []
    for check in checks:
        results.append(await run_check(check.name, check.group, partial(check.work, api)))
        show(results[-1])
    return results


async def _run(args: argparse.Namespace) -> int:
    url = args.url.rstrip("/").removesuffix("/v1")
    checks = chosen_checks(all_checks(args), args.only)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=args.timeout_s)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    # A connection of its own for each request: some servers hang up after a stream without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 24
    ) as session:
        model = args.model or await first_model(url, args.api_key)
        print(f"{len(checks)} checks of {url}, model {model}", file=sys.stderr)
        results = await run_checks(Api(session, url, model), checks, lambda result: print(line(result), flush=True))
    print(", ".join(f"{count} {name}" for name, count in summary(results).items()))
    if args.output is not None:
        write_report(args.output, {"url": url, "model": model, "started": started}, results)
    return int(any(result.status is Status.FAIL for result in results))


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench check-server", description="Checks any server that speaks OpenAI's API."
    )
    parser.add_argument("url", help="for example http://127.0.0.1:8000")
    parser.add_argument(
        "--output", type=output_file, metavar="REPORT", help="JSON report to write; a .md goes beside it"
    )
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a group, or 'group: check'; repeatable"
    )
    parser.add_argument("--tools", action="store_true", help="the model calls tools")
    parser.add_argument("--reasoning", action="store_true", help="the model reasons before it answers")
    parser.add_argument(
        "--eval-file", type=input_file, metavar="FILE", help="multiple-choice questions, one JSON object a line"
    )
    parser.add_argument("--limit", type=int, default=100, help="questions of the file to ask; default %(default)s")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="fail below it; default %(default)s")
    parser.add_argument(
        "--eval-reference", type=input_file, metavar="FILE", help="JSON with the log-likelihoods to meet"
    )
    parser.add_argument("--concurrency", type=int, default=32, help="clients at once; default %(default)s")
    parser.add_argument(
        "--context-sizes",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[100, 400, 1600],
        metavar="WORDS,...",
        help="prompts to time; default 100,400,1600",
    )
    parser.add_argument("--timeout-s", type=float, default=120.0, help="longest silence of the server")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; 1 if one failed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if min(args.limit, args.concurrency, args.timeout_s, *args.context_sizes) <= 0:
        parser.error("--limit, --concurrency, --timeout-s and --context-sizes: more than 0")
    return asyncio.run(_run(args))
