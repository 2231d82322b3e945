"""Every API says how much of a prompt came from the prefix cache, and the metrics say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from serve import HttpServer
from tests.serve.paged_runner import PAGE_TOKENS, PagedScriptedRunner
from tests.serve.running import running_server
from tests.serve.test_invalid_requests import post
from tests.serve.test_limits_and_faults import metrics

TEXT = "all work and no play makes a dull prompt " * 5
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with running_server(PagedScriptedRunner(), engine_options={"prefix_cache": True}) as running:
        yield running


def openai_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def anthropic_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    assert usage["cache_creation_input_tokens"] == 0
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


APIS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], tuple[int, int]]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, openai_usage),
    ("/v1/completions", {"prompt": TEXT}, openai_usage),
    ("/v1/responses", {"input": TEXT}, responses_usage),
    ("/v1/messages", {"model": "scripted", "max_tokens": 9, "messages": MESSAGES}, anthropic_usage),
]
STREAMED_USAGE = {
    "/v1/chat/completions": lambda events: events[-1],
    "/v1/completions": lambda events: events[-1],
    "/v1/responses": lambda events: events[-1]["response"],
    "/v1/messages": lambda events: events[0]["message"],
}


def expected_hit(prompt_tokens: int) -> int:
    """Whole pages, and at least the last token is computed."""
    return (prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize(("path", "body", "usage_of"), APIS, ids=[path for path, _, _ in APIS])
async def test_usage_tells_what_the_cache_gave(
    server: HttpServer, path: str, body: dict[str, Any], usage_of: Callable[[dict[str, Any]], tuple[int, int]]
) -> None:
    _, cold = await post(server, path, body)
    _, warm = await post(server, path, body)
    tokens, hit = usage_of(cold)
    assert hit == 0 and tokens > len(TEXT) / 2
    assert usage_of(warm) == (tokens, expected_hit(tokens))
    assert (await metrics(server))["resin_prefix_hit_tokens_total"] == expected_hit(tokens)
    _, salted = await post(server, path, body | {"cache_salt": "another"})
    assert usage_of(salted) == (tokens, 0)


@pytest.mark.parametrize(("path", "body", "usage_of"), APIS, ids=[path for path, _, _ in APIS])
async def test_streams_tell_it_too(
    server: HttpServer, path: str, body: dict[str, Any], usage_of: Callable[[dict[str, Any]], tuple[int, int]]
) -> None:
    _, cold = await post(server, path, body)
    tokens, _ = usage_of(cold)
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.post(path, json=body | {"stream": True} | options) as response,
    ):
        lines = (await response.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert usage_of(STREAMED_USAGE[path](events)) == (tokens, expected_hit(tokens))


async def test_each_prompt_of_a_completion_counts_once(server: HttpServer) -> None:
    prompts = [TEXT, TEXT[::-1]]
    _, cold = await post(server, "/v1/completions", {"prompt": prompts, "n": 2})
    _, warm = await post(server, "/v1/completions", {"prompt": prompts, "n": 2})
    lengths = [openai_usage((await post(server, "/v1/completions", {"prompt": text}))[1])[0] for text in prompts]
    assert openai_usage(cold)[0] == sum(lengths)
    assert openai_usage(warm) == (sum(lengths), sum(map(expected_hit, lengths)))
