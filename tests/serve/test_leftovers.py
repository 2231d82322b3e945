"""Whatever clients send, and whenever they leave: no live request, page, job or task stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from serve import HttpServer
from tests.serve.paged_runner import PagedScriptedRunner
from tests.serve.running import running_server
from tests.serve.test_limits_and_faults import LONG, metrics, wait_until

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
TOOL = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [TOOL], "stop": ["x"], "logit_bias": {"65": 1}, "n": 1},
    "/v1/completions": {"prompt": [72, 101, 108], "stop": ["x"], "logprobs": 2, "echo": True},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "tools": []},
    "/v1/messages": {"model": "scripted", "messages": MESSAGES, "system": "Be brief.", "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": MESSAGES},
    "/tokenize": {"messages": MESSAGES, "add_generation_prompt": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
LIMITS = {"/v1/responses": "max_output_tokens"}
ODD_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    {"a": {"b": []}},
    "\ud800",
    ["x", 5],
    "\u0000",
]
COUNTS = [60, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.fixture
def server() -> Iterator[HttpServer]:
    runner = PagedScriptedRunner(step_s=0.0005)
    runner.answer("story", LONG)
    with running_server(runner, engine_options={"prefix_cache": True}) as running:
        yield running


def tasks_of(server: HttpServer) -> int:
    """Tasks of the server's event loop."""
    done = threading.Event()
    found: list[int] = []

    def count() -> None:
        found.append(len(asyncio.all_tasks()))
        done.set()

    assert server._loop is not None
    server._loop.call_soon_threadsafe(count)
    assert done.wait(5)
    return found[0]


async def assert_nothing_is_left(server: HttpServer, tasks: int) -> None:
    actor = server.service.actor
    await wait_until(lambda: not actor.jobs and not actor.active and not actor.queued and not actor.outbox, 20)
    await wait_until(lambda: not actor.engine.has_work())
    await wait_until(lambda: tasks_of(server) <= tasks + 1, 10)  # one may be the connection of the last look
    found = await metrics(server)
    states = {("waiting", ""), ("prefill", "0"), ("decode", "0")}
    assert not any(found[f'resin_requests{{replica="{replica}",state="{name}"}}'] for name, replica in states)
    assert found['resin_pool_pages{replica="0",state="leased"}'] == 0
    assert found["resin_http_requests_in_progress"] == 1  # this very scrape
    actor.engine.scheduler.replicas[0].cache.check_integrity(())


def malformed(rng: random.Random, path: str) -> bytes:
    """A good body with something wrong in it; a few may still be good."""
    body = json.loads(json.dumps(BODIES[path]).replace("story", "word"))
    body[LIMITS.get(path, "max_tokens")] = 3
    kind = rng.randrange(5)
    if kind == 0:
        text = json.dumps(body).encode()
        return text[: rng.randrange(len(text))]
    if kind == 1:
        text = bytearray(json.dumps(body).encode())
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        return bytes(text)
    holder: Any = body
    while True:  # somewhere inside
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.4:
            break
        holder = inner
    if kind == 2:
        del holder[key]
    elif kind == 3 and isinstance(holder, dict):
        holder[rng.choice(["temperature", "top_p", "stream", "tools", "stop", "content", "role", "type"])] = rng.choice(
            ODD_VALUES
        )
    else:
        holder[key] = rng.choice(ODD_VALUES)
    return json.dumps(body).encode()


@pytest.mark.parametrize("count", COUNTS)
async def test_malformed_bodies(server: HttpServer, count: int) -> None:
    rng = random.Random(count)
    tasks = tasks_of(server)
    refused = 0
    async with aiohttp.ClientSession(server.url) as session:
        for number in range(count):
            path = list(BODIES)[number % len(BODIES)]
            data = malformed(rng, path)
            async with session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
                answer = await response.read()
            assert response.status < 500, (path, data, answer)
            if response.status >= 400:
                refused += 1
                assert json.loads(answer)["error"]["message"], (path, data, answer)
    assert refused > count / 2
    await assert_nothing_is_left(server, tasks)


@pytest.mark.parametrize("count", COUNTS)
async def test_disconnects_in_the_middle_of_streams(server: HttpServer, count: int) -> None:
    paths = [path for path in BODIES if path.startswith("/v1/") and not path.endswith("count_tokens")]
    tasks = tasks_of(server)

    async def leave(number: int) -> None:
        path = paths[number % len(paths)]
        body = BODIES[path] | {"stream": True, LIMITS.get(path, "max_tokens"): 2000}
        if path == "/v1/responses":
            body["input"] = "Tell me a story about a fox."
        data = json.dumps(body | ({"prompt": "A story"} if "prompt" in body else {})).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        if number % 3:  # before the first token, at once after it, or later
            seen = await reader.read(1 if number % 3 == 1 else 3000)
            assert seen.startswith(b"H")
        writer.transport.abort()

    for start in range(0, count, 20):
        await asyncio.gather(*(leave(number) for number in range(start, start + 20)))
    await assert_nothing_is_left(server, tasks)
    assert server.service.engine.runner.steps < 20 * count  # streams to their ends would take 2000 steps each
