"""Full queues, clients that leave or do not read, engines that break, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from resin import Engine, EngineFailed
from resin.recipes import get_native_recipe
from serve import HttpServer, ServerConfig
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner

LONG = "abcdefghij" * 390


def body(text: str = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}


@contextlib.asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[Callable[..., Any]]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        yield lambda request: session.post("/v1/chat/completions", json=request)


async def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.005)


async def metrics(server: HttpServer) -> dict[str, float]:
    async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def wait_for_state(server: HttpServer, **expected: int) -> None:
    """Polls /health until it says so."""
    deadline = time.monotonic() + 60
    async with aiohttp.ClientSession(server.url) as session:
        while True:
            async with session.get("/health") as response:
                state = await response.json()
            if all(state[name] == value for name, value in expected.items()):
                return
            assert time.monotonic() < deadline, state
            await asyncio.sleep(0.005)


class Gate:
    """Holds a runner's steps until opened."""

    def __init__(self, runner: ScriptedRunner) -> None:
        self._event = threading.Event()
        runner.before_step = lambda: self._event.wait(60) and None  # type: ignore[func-returns-value]

    def open(self) -> None:
        self._event.set()


async def test_a_full_queue_answers_429_and_the_rest_is_served_in_order() -> None:
    runner = ScriptedRunner()
    gate = Gate(runner)
    with running_server(runner, request_queue_capacity=3, max_active_sessions=2) as server:
        try:
            async with connected(server) as post:
                running = [asyncio.ensure_future(_status(post, body()))]
                await wait_for_state(server, active_sessions=1)
                waiting = [asyncio.ensure_future(_status(post, body())) for _ in range(3)]
                await wait_for_state(server, active_sessions=1, queued=3)
                async with post(body()) as response:
                    assert response.status == 429
                    assert response.headers["Retry-After"] == "1"
                    assert (await response.json())["error"]["code"] == "queue_full"
                async with post(body(n=2)) as response:
                    assert response.status == 429
                gate.open()
                assert await asyncio.gather(*running, *waiting) == [200] * 4
                found = await metrics(server)
                assert found['resin_http_limit{name="request_queue_capacity"}'] == 3
                assert found["resin_http_queue_depth"] == found["resin_http_active_sessions"] == 0
        finally:
            gate.open()


async def _status(post: Callable[..., Any], request: dict[str, Any]) -> int:
    async with post(request) as response:
        await response.read()
        status: int = response.status
        return status


async def test_at_most_four_are_admitted_before_a_step() -> None:
    runner = ScriptedRunner()
    gate = Gate(runner)
    with running_server(runner, max_active_sessions=6) as server:
        try:
            async with connected(server) as post:
                tasks = [asyncio.ensure_future(_status(post, body()))]
                await wait_for_state(server, active_sessions=1)  # it is inside its first step now
                actor = server.service.actor
                seen: list[int] = []
                runner.before_step = lambda: seen.append(actor.active)
                tasks += [asyncio.ensure_future(_status(post, body(str(i)))) for i in range(11)]
                await wait_for_state(server, queued=11)
                gate.open()
                assert await asyncio.gather(*tasks) == [200] * 12
        finally:
            gate.open()
    assert seen[:2] == [5, 6]  # four more, then one more: no more than six at once
    assert max(seen) == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_cancelled(stream: bool) -> None:
    runner = ScriptedRunner(default=LONG, step_s=0.002)
    with running_server(runner) as server:
        async with connected(server) as post:
            async with connected(server) as other:
                survivor = asyncio.ensure_future(_status(other, body(max_tokens=60)))
                request = asyncio.ensure_future(_read_some(post, body(stream=stream), stream))
                await asyncio.sleep(0.1)
                request.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await request
                assert await survivor == 200
        await asyncio.sleep(0.1)
        steps = runner.steps
        await asyncio.sleep(0.1)
        assert runner.steps == steps  # nothing runs any more
        assert steps < 1000
        assert (await metrics(server))["resin_http_disconnects_total"] == 1


async def _read_some(post: Callable[..., Any], request: dict[str, Any], stream: bool) -> None:
    async with post(request) as response:
        if stream:
            async for _ in response.content:
                pass
        await response.read()


async def test_a_client_that_does_not_read_is_cancelled_and_others_are_not() -> None:
    # Logprobs make the events large, so the socket's buffers fill soon.
    runner = ScriptedRunner(default=LONG)
    with running_server(runner, client_buffer_events=8) as server:
        payload = json.dumps(body(stream=True, n=8, logprobs=True, top_logprobs=20)).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(payload)}\r\n\r\n"
            slow.sendall(head.encode() + payload)
            async with connected(server) as post:
                assert await _status(post, body(max_tokens=20)) == 200

            async def is_cut() -> bool:
                return (await metrics(server))["resin_http_slow_clients_total"] == 1

            deadline = time.monotonic() + 20
            while not await is_cut():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        found = await metrics(server)
        assert found["resin_http_active_sessions"] == 0
        assert runner.steps < 8 * len(LONG)


async def test_a_request_that_takes_too_long_ends_with_504() -> None:
    runner = ScriptedRunner(default=LONG, step_s=0.01)
    with running_server(runner, request_timeout_s=0.15) as server:
        async with connected(server) as post:
            async with post(body()) as response:
                assert response.status == 504
                assert (await response.json())["error"]["type"] == "timeout_error"
            async with post(body(stream=True)) as response:
                assert response.status == 200
                events = [line for line in (await response.text()).splitlines() if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
            assert events[-1] == "data: [DONE]"


async def test_waiting_in_the_queue_counts_against_the_timeout() -> None:
    runner = ScriptedRunner(default=LONG, step_s=0.01)
    with running_server(runner, max_active_sessions=1, request_timeout_s=0.3) as server:
        async with connected(server) as post:
            assert await asyncio.gather(*(_status(post, body()) for _ in range(3))) == [504] * 3


async def test_engine_failure_tells_everybody_and_stops_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    runner = ScriptedRunner(default=LONG, step_s=0.002)
    with caplog.at_level(logging.INFO, "resin.serve"), running_server(runner, max_active_sessions=2) as server:
        async with connected(server) as post:
            streams = [asyncio.ensure_future(_text(post, body(stream=True))) for _ in range(2)]
            await wait_for_state(server, active_sessions=2)
            queued = asyncio.ensure_future(_status(post, body()))
            await wait_for_state(server, queued=1)
            runner.fails_with = RuntimeError("device lost")
            for text in await asyncio.gather(*streams):
                assert '"type":"server_error"' in text
                assert "device lost" not in text
            assert await queued == 500
        await wait_until(server._finished.is_set)
        with pytest.raises(aiohttp.ClientConnectionError):
            async with connected(server) as post:
                await _status(post, body())
    assert "device lost" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.CRITICAL


async def _text(post: Callable[..., Any], request: dict[str, Any]) -> str:
    async with post(request) as response:
        text: str = await response.text()
        return text


def test_serve_raises_engine_failed() -> None:
    runner = ScriptedRunner()
    runner.fails_with = RuntimeError("device lost")
    recipe = get_native_recipe("qwen3", TOKENIZER)
    server = HttpServer(Engine(runner), recipe=recipe, model="scripted", config=ServerConfig(port=0))
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except EngineFailed as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert server.wait_ready(5)
    asyncio.run(_ask_once(server))
    thread.join(5)
    assert len(raised) == 1
    assert not server.wait_ready(0)


async def _ask_once(server: HttpServer) -> None:
    async with connected(server) as post:
        assert await _status(post, body()) == 500


async def test_shutdown_lets_running_requests_finish() -> None:
    runner = ScriptedRunner(default="abcdefghij" * 10, step_s=0.005)
    with running_server(runner) as server:
        async with connected(server) as post:
            streams = [asyncio.ensure_future(_text(post, body(stream=True))) for _ in range(3)]
            await wait_for_state(server, active_sessions=3)
            server.shutdown(wait=False)
            for text in await asyncio.gather(*streams):
                assert text.endswith("data: [DONE]\n\n")
                assert '"finish_reason":"stop"' in text


async def test_shutdown_cuts_what_does_not_finish_in_time() -> None:
    runner = ScriptedRunner(default=LONG, step_s=0.01)
    engine = Engine(runner)
    config = ServerConfig(port=0, drain_timeout_s=0.2)
    server = HttpServer(engine, recipe=get_native_recipe("qwen3", TOKENIZER), model="scripted", config=config)
    thread = threading.Thread(target=server.serve)
    thread.start()
    assert server.wait_ready(5)
    async with connected(server) as post:
        stream = asyncio.ensure_future(_text(post, body(stream=True)))
        await wait_for_state(server, active_sessions=1)
        started = time.monotonic()
        server.shutdown(wait=False)
        assert '"code":"unavailable"' in await stream
        await asyncio.to_thread(thread.join, 5)
        assert time.monotonic() - started < 3
    assert not thread.is_alive() and not engine.has_work()


def test_shutdown_before_serve_ends_it_at_once() -> None:
    server = HttpServer(Engine(ScriptedRunner()), model="m", config=ServerConfig(port=0))
    server.shutdown()
    server.serve()
    assert not server.wait_ready(0)


async def test_stream_interval_joins_tokens() -> None:
    runner = ScriptedRunner(default="abcdefghij", step_s=0.01)
    with running_server(runner, stream_interval=4) as server:
        async with connected(server) as post:
            text = await _text(post, body(stream=True))
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert [piece for piece in pieces if piece] == ["a", "bcde", "fghi", "j"]


async def test_request_ids_are_kept_or_made() -> None:
    with running_server(ScriptedRunner()) as server:
        async with aiohttp.ClientSession(server.url) as session:
            async with session.get("/health", headers={"x-request-id": "abc-1"}) as response:
                assert response.headers["x-request-id"] == "abc-1"
            async with session.get("/health", headers={"x-request-id": "no spaces please"}) as response:
                assert response.headers["x-request-id"].startswith("req_")
            async with session.post("/v1/chat/completions", json=body(stream=True)) as response:
                assert response.headers["x-request-id"].startswith("req_")
                assert "Access-Control-Allow-Origin" not in response.headers
