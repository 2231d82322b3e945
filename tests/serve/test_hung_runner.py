"""A runner whose step does not return: clients, /health and shutdown go on without it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resin import Engine
from resin.recipes import get_native_recipe
from serve import HttpServer, ServerConfig
from serve import server as server_module
from serve.server import EngineHangs
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner
from tests.serve.test_limits_and_faults import LONG, Gate, _status, _text, body, connected, metrics, wait_until
from tests.serve.test_status import health_of


@pytest.fixture
def runner() -> Iterator[ScriptedRunner]:
    runner = ScriptedRunner(default=LONG, step_s=0.002)
    yield runner
    runner.before_step = lambda: None


async def wait_for_status(server: HttpServer, expected: int) -> str:
    deadline = time.monotonic() + 20
    while True:
        status, state = await health_of(server)
        if status == expected:
            return str(state["status"])
        assert time.monotonic() < deadline, state
        await asyncio.sleep(0.01)


async def test_requests_run_out_of_time_wherever_they_are(runner: ScriptedRunner) -> None:
    with running_server(runner, request_timeout_s=0.6, max_active_sessions=2) as server:
        async with connected(server) as post:
            stream = asyncio.ensure_future(_text(post, body(stream=True)))
            await wait_until(lambda: runner.steps > 5)
            gate = Gate(runner)
            try:
                started = time.monotonic()
                others = [asyncio.ensure_future(_status(post, body(stream=bool(i % 2)))) for i in range(4)]
                assert await asyncio.gather(*others) == [504] * 4  # one of them active, the others queued
                assert '"code":"timeout"' in await stream
                assert time.monotonic() - started < 3
                assert (await health_of(server))[1]["queued"] == 0
            finally:
                gate.open()
            await wait_until(lambda: server.service.actor.active == 0)
            runner.answer("again", "Fine.")
            assert await _status(post, body("again")) == 200


async def test_health_is_503_while_a_step_does_not_end(
    runner: ScriptedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "resin.serve"), running_server(runner, stall_timeout_s=0.2) as server:
        async with connected(server) as post:
            stream = asyncio.ensure_future(_status(post, body(max_tokens=300)))
            await wait_until(lambda: runner.steps > 5)
            assert await wait_for_status(server, 200) == "ok"
            gate = Gate(runner)
            try:
                assert await wait_for_status(server, 503) == "stalled"
                assert (await metrics(server))["resin_http_step_age_seconds"] > 0.2
                await wait_until(lambda: "no step for" in caplog.text)
            finally:
                gate.open()
            assert await wait_for_status(server, 200) == "ok"
            assert await stream == 200
            await wait_until(lambda: "makes steps again" in caplog.text)
        assert caplog.text.count("no step for") == 1
        await asyncio.sleep(0.3)  # having nothing to do is no stall
        assert (await health_of(server))[0] == 200


async def test_a_queued_client_that_leaves_makes_room_although_no_step_ends(runner: ScriptedRunner) -> None:
    with running_server(runner, max_active_sessions=1, request_queue_capacity=1) as server:
        gate = Gate(runner)
        try:
            async with connected(server) as post:
                running = asyncio.ensure_future(_status(post, body(max_tokens=3)))
                await wait_until(lambda: server.service.actor.active == 1)
                queued = asyncio.ensure_future(_status(post, body()))
                await wait_until(lambda: server.service.actor.queued == 1)
                queued.cancel()
                await wait_until(lambda: server.service.actor.queued == 0)
                gate.open()
                assert await running == 200
        finally:
            gate.open()


async def test_shutdown_has_a_limit(runner: ScriptedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_LIMIT_S", 0.2)
    config = ServerConfig(port=0, drain_timeout_s=0.2)
    server = HttpServer(Engine(runner), recipe=get_native_recipe("qwen3", TOKENIZER), model="scripted", config=config)
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except EngineHangs as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert server.wait_ready(5)
    async with connected(server) as post:
        stream = asyncio.ensure_future(_text(post, body(stream=True)))
        await wait_until(lambda: runner.steps > 5)
        gate = Gate(runner)
        try:
            started = time.monotonic()
            server.shutdown(wait=False)
            assert '"type":"server_error"' in await stream
            await asyncio.to_thread(thread.join, 5)
            assert not thread.is_alive() and time.monotonic() - started < 3
        finally:
            gate.open()
    assert "has not returned" in str(raised[0])
    await wait_until(lambda: not server.service.actor.is_alive)


SERVE = """
import sys, threading
from resin import Engine
from resin.recipes import get_native_recipe
from serve import cli, server
from serve.commands import serving
from serve.loaded_model import LoadedModel
from resin.models.sampling_defaults import SamplingDefaults
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner
server.STOP_LIMIT_S = 0.2
runner = ScriptedRunner()
def hang():
    print("hangs", flush=True)
    threading.Event().wait()
runner.before_step = hang
recipe = get_native_recipe("qwen3", TOKENIZER)
serving.load_model = lambda args: LoadedModel("scripted", Engine(runner), TOKENIZER, recipe, SamplingDefaults())
sys.exit(cli.main(["serve", "--port", "0", "--drain-timeout-s", "0.2"]))
"""


def test_sigterm_ends_the_command_although_the_runner_hangs() -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        url = ""
        while "is ready at" not in url:
            url = process.stderr.readline()
            assert url, "the server did not start"
        asyncio.run(_ask_and_leave(url.split()[-1]))
        assert process.stdout.readline() == "hangs\n"
        entry = json.loads(process.stdout.readline())  # the access log, and nothing else, stands on standard output
        assert (entry["path"], entry["status"]) == ("/v1/chat/completions", 499) and entry["time"].endswith("+00:00")
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
        assert time.monotonic() - started < 5
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert log.splitlines()[-1].startswith("resin: the server stopped: the engine's last step has not returned")
    assert "Traceback" not in log


async def _ask_and_leave(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body()).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()
