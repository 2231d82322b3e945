"""The server checks pass on a good server, and each notices its own fault."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.check_server.api import Api
from bench.check_server.command import all_checks, build_parser, chosen_checks, run_checks
from bench.check_server.outcome import Result, Status
from serve import HttpServer
from tests.bench.faulty_server import EchoRunner, Fault, proxied
from tests.serve.running import running_server

Events = list[dict[str, Any]]
COUNTER = itertools.count()
ASCII = [{"role": "user", "content": "x"}]
QUESTIONS = [
    {"id": "q1", "question": "Which is shorter?", "choices": ["a long choice of words", "short"], "answer": 1},
    {"id": "c1", "context": "It was", "endings": ["raining", "raining all day long"], "answer": 0},
]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with running_server(EchoRunner(), engine_options={"prefix_cache": True}) as running:
        yield running


@pytest.fixture
def eval_file(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return path


def message(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["choices"][0]["message"]
    return found


def deltas(events: Events) -> Iterator[dict[str, Any]]:
    for event in events:
        for choice in event["choices"]:
            if choice.get("delta", {}).get("content"):
                yield choice["delta"]


def respell(change: Callable[[str], str]) -> Callable[[Events], Events]:
    """Changes the text of every chunk."""

    def events(events: Events) -> Events:
        for delta in deltas(events):
            delta["content"] = change(delta["content"])
        return events

    return events


def broken_emoji(events: Events) -> Events:
    for event in events:
        for choice in event["choices"]:
            choice["text"] = choice.get("text", "").replace("東", "\ufffd\ufffd")
    return events


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: {name: value for name, value in body.items() if name not in names}


def doubled_finish(events: Events) -> Events:
    last = next(event for event in events if event["choices"] and event["choices"][0]["finish_reason"])
    return [*events, last]


def text_after_finish(events: Events) -> Events:
    late = copy.deepcopy(next(event for event in events if list(deltas([event]))))
    return [*events, late]


def two_ids(events: Events) -> Events:
    events[-1]["id"] += "x"
    return events


def in_one_piece(events: Events) -> Events:
    pieces = list(deltas(events))
    pieces[0]["content"] = "".join(piece["content"] for piece in pieces)
    for piece in pieces[1:]:
        piece["content"] = ""
    return events


def more_usage(events: Events) -> Events:
    for event in events:
        if event.get("usage"):
            event["usage"]["completion_tokens"] += 1
            event["usage"]["total_tokens"] += 1
    return events


def all_cached(events: Events) -> Events:
    for event in events:
        if event.get("usage"):
            event["usage"]["prompt_tokens_details"] = {"cached_tokens": event["usage"]["prompt_tokens"]}
    return events


def numbered(body: dict[str, Any]) -> None:
    message(body)["content"] += str(next(COUNTER))


def slow_when_seen() -> Callable[[dict[str, Any]], float]:
    seen: set[str] = set()

    def delay_s(body: dict[str, Any]) -> float:
        text = json.dumps(body["messages"])
        is_old = text in seen
        seen.add(text)
        return 0.3 if is_old else 0.0

    return delay_s


def fails_on_long(status: int, path: str) -> int:
    return 500 if status >= 400 else status


def set_call(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: message(body)["tool_calls"][0]["function"].update(fields)


def renamed_call(events: Events) -> Events:
    for event in events:
        for call in (event["choices"] or [{"delta": {}}])[0]["delta"].get("tool_calls") or []:
            call["function"]["name"] = "get_whether"
    return events


def show_thoughts(body: dict[str, Any]) -> None:
    message(body)["content"] = f"<think>{message(body).get('reasoning_content')}</think>"


def spoil_logprobs(body: dict[str, Any]) -> None:
    found = body["choices"][0]["logprobs"]["token_logprobs"]
    found[1:] = [-value for value in found[1:]]


def only_when_streaming_seen() -> Fault:
    """Goes wrong after the first stream, as a server might that does not survive clients who leave."""
    seen: list[bool] = []

    def request(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            seen.append(True)
        return body

    return Fault(request=request, answer=lambda body: seen and message(body).update(content="broken"))


FAULTS: list[tuple[str, Fault]] = [
    ("correctness: models", Fault(answer=lambda body: body.update(data=[]))),
    ("correctness: models", Fault(answer=lambda body: body.update(data=body["data"] * 2))),
    ("correctness: chat", Fault(answer=lambda body: message(body).update(role="user"))),
    ("correctness: chat", Fault(answer=lambda body: message(body).update(content=""))),
    ("correctness: chat", Fault(answer=lambda body: body.pop("choices"))),
    ("correctness: completions", Fault(answer=lambda body: body.update(object="chat.completion"))),
    ("correctness: completions", Fault(request=lambda body: body | {"prompt": "x"})),
    ("correctness: greedy answers repeat", Fault(answer=numbered)),
    ("correctness: stop string", Fault(request=without("stop"))),
    ("correctness: max_tokens", Fault(request=lambda body: body | {"max_tokens": body["max_tokens"] + 5})),
    (
        "correctness: max_tokens",
        Fault(answer=lambda body: body["choices"][0].update(finish_reason="stop")),
    ),
    ("correctness: usage", Fault(answer=lambda body: body["usage"].update(total_tokens=1))),
    ("correctness: usage", Fault(answer=lambda body: body["usage"].update(prompt_tokens=0))),
    ("correctness: choices", Fault(answer=lambda body: body["choices"].pop())),
    (
        "correctness: logprobs",
        Fault(answer=lambda body: body["choices"][0]["logprobs"]["content"][0].update(logprob=0.5)),
    ),
    ("correctness: logprobs", Fault(answer=lambda body: body["choices"][0]["logprobs"]["content"].pop())),
    ("correctness: json schema", Fault(answer=lambda body: message(body).update(content='{"kind": "stone"}'))),
    ("errors: broken JSON", Fault(status=lambda status, path: 500)),
    ("errors: missing field", Fault(status=lambda status, path: 200)),
    ("errors: wrong type", Fault(answer=lambda body: body.update(error="no"))),
    ("errors: unknown model", Fault(answer=lambda body: body.pop("error"))),
    ("errors: unknown path", Fault(status=lambda status, path: 200)),
    ("errors: API key", Fault(status=lambda status, path: 500)),
    ("errors: malformed bodies", Fault(status=lambda status, path: 502 if status == 400 else status)),
    ("errors: prompt too long", Fault(status=lambda status, path: 500)),
    ("streaming: equals whole answer", Fault(events=respell(str.upper))),
    ("streaming: completions", Fault(events=lambda events: events[1:])),
    ("streaming: form", Fault(events=doubled_finish)),
    ("streaming: form", Fault(events=text_after_finish)),
    ("streaming: form", Fault(events=two_ids)),
    ("streaming: form", Fault(events=lambda events: events[1:])),
    ("streaming: form", Fault(omits_done=True)),
    ("streaming: form", Fault(content_type="text/plain")),
    ("streaming: form", Fault(events=lambda events: [*events, {"error": {"message": "out of memory"}}])),
    ("streaming: gradual", Fault(events=in_one_piece)),
    ("streaming: usage", Fault(events=more_usage)),
    ("streaming: usage", Fault(events=lambda events: [events[-1], *events[:-1]])),
    ("streaming: whole characters", Fault(events=respell(lambda text: text.replace("ö", "\ufffd")))),
    ("streaming: whole characters", Fault(events=respell(lambda text: text.replace("ö", "")))),
    (
        "streaming: whole characters",
        Fault(request=lambda body: body | ({"messages": ASCII} if "messages" in body else {}), events=broken_emoji),
    ),
    ("streaming: stop string", Fault(request=lambda body: without("stop")(body) if "stream" in body else body)),
    ("prefix cache: reuse", Fault(events=all_cached)),
    ("prefix cache: same answer", Fault(events=respell(lambda text: text + str(next(COUNTER))))),
    ("prefix cache: first token", Fault(delay_s=slow_when_seen())),
    ("first token: by prompt size", Fault(events=lambda events: [])),
    ("stress: burst", Fault(events=respell(lambda text: "x"))),
    ("stress: disconnects", only_when_streaming_seen()),
    ("stress: health", Fault(status=lambda status, path: 500 if path == "/health" else status)),
    ("tools: call", Fault(answer=set_call(arguments='{"city": 5}'))),
    (
        "tools: call",
        Fault(answer=lambda body: message(body).update(tool_calls=None)),
    ),
    ("tools: streamed call", Fault(events=renamed_call)),
    ("tools: result", Fault(answer=lambda body: message(body).update(content=""))),
    ("reasoning: apart from the answer", Fault(answer=show_thoughts)),
    ("evaluation: questions.jsonl", Fault(answer=spoil_logprobs)),
    ("evaluation: questions.jsonl", Fault(status=lambda status, path: 500)),
]

LACKS: list[tuple[str, Fault]] = [
    ("correctness: completions", Fault(status=lambda status, path: 404)),
    ("correctness: usage", Fault(answer=lambda body: body.pop("usage"))),
    ("correctness: logprobs", Fault(answer=lambda body: body["choices"][0].pop("logprobs"))),
    ("errors: unknown model", Fault(request=lambda body: without("model")(body))),
    ("streaming: usage", Fault(request=without("stream_options"))),
    ("prefix cache: reuse", Fault(request=without("stream_options"))),
    ("stress: health", Fault(status=lambda status, path: 404)),
]


async def check(url: str, eval_file: Path, *only: str) -> list[Result]:
    options = "--tools --reasoning --min-accuracy 1 --concurrency 12 --context-sizes 20,100,4000"
    args = build_parser().parse_args([url, "--eval-file", str(eval_file), *options.split()])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        api = Api(session, url, "scripted")
        return await run_checks(api, chosen_checks(all_checks(args), only), lambda result: None)


async def test_a_good_server_passes(server: HttpServer, eval_file: Path) -> None:
    results = {f"{result.group}: {result.name}": result for result in await check(server.url, eval_file)}
    assert set(results) == {name for name, _ in FAULTS}, "every check has a fault below"
    outcomes = {name: (result.status, result.reason) for name, result in results.items()}
    assert outcomes.pop("errors: API key") == (Status.SKIPPED, "the server asks for no key")
    assert set(outcomes.values()) == {(Status.PASS, "")}, outcomes
    figures = results["first token: by prompt size"].figures
    assert figures["20_words"]["first_ms"] > 0 and figures["4000_words"] == "refused with 400"
    assert results["prefix cache: reuse"].figures["cached_tokens_warm"] > 1000
    assert results["evaluation: questions.jsonl"].figures["accuracy"] == 1.0


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(FAULTS)])
async def test_each_check_notices_its_fault(server: HttpServer, eval_file: Path, name: str, fault: Fault) -> None:
    async with proxied(server.url, fault) as url:
        (result,) = await check(url, eval_file, name)
    assert result.status is Status.FAIL, result
    assert result.reason


@pytest.mark.parametrize(("name", "fault"), LACKS, ids=[name for name, _ in LACKS])
async def test_what_is_not_offered_is_skipped(server: HttpServer, eval_file: Path, name: str, fault: Fault) -> None:
    async with proxied(server.url, fault) as url:
        (result,) = await check(url, eval_file, name)
    assert (result.status, bool(result.reason)) == (Status.SKIPPED, True), result
