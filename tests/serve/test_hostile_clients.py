"""Clients that send slowly, send rubbish, or take nothing of what they get."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import time
import zlib

import pytest

from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner
from tests.serve.test_limits_and_faults import _status as status_of
from tests.serve.test_limits_and_faults import body, connected, wait_until

CHAT = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SMALL = json.dumps(body()).encode()


async def exchange(server: HttpServer, *parts: bytes, pause_s: float = 0.0, wait_s: float = 10.0) -> bytes:
    """Sends parts and returns everything that comes back until the server closes, or for `wait_s` after the last."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    received: list[bytes] = []

    async def receive() -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                received.append(data)

    receiving = asyncio.ensure_future(receive())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.wait({receiving}, timeout=pause_s)
            if receiving.done():
                break
    await asyncio.wait({receiving}, timeout=wait_s)
    receiving.cancel()
    writer.transport.abort()
    return b"".join(received)


@pytest.mark.parametrize("begun", [0, 1, 13, 40, len(CHAT) - 2, len(CHAT) + 8])
async def test_slow_headers_are_cut_off(begun: int) -> None:
    with running_server(ScriptedRunner(), client_timeout_s=0.3) as server:
        started = time.monotonic()
        head = CHAT.encode() + b"X-Slow: " + b"a" * 100
        # A byte at a time, each of which must not buy more time; no byte at all is as slow.
        dribble = [head[place : place + 1] for place in range(begun, begun + 40)] if begun else []
        assert await exchange(server, head[:begun], *dribble, pause_s=0.05) == b""
        assert 0.25 < time.monotonic() - started < 1.5


async def test_slow_headers_on_a_used_connection_are_cut_off() -> None:
    with running_server(ScriptedRunner(), client_timeout_s=0.3) as server:
        head = f"{CHAT}Content-Length: {len(SMALL)}\r\n\r\n".encode()
        started = time.monotonic()
        answer = await exchange(server, head + SMALL, *(bytes([letter]) for letter in CHAT.encode()), pause_s=0.05)
        assert answer.count(b"HTTP/1.1 200") == 1
        assert 0.25 < time.monotonic() - started < 1.5


@pytest.mark.parametrize("stated", [True, False])
async def test_a_slow_body_is_408(stated: bool) -> None:
    with running_server(ScriptedRunner(), client_timeout_s=0.3) as server:
        length = "Content-Length: 1000" if stated else "Transfer-Encoding: chunked"
        pieces = [b"x" if stated else b"1\r\nx\r\n"] * 12
        answer = await exchange(server, f"{CHAT}{length}\r\n\r\n".encode(), *pieces, pause_s=0.05, wait_s=0)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "slow_body"
        async with connected(server) as post:
            assert await status_of(post, body()) == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_takes_nothing_is_cut_off(stream: bool) -> None:
    runner = ScriptedRunner(default="abcdefghij" * 300)
    with running_server(runner, client_timeout_s=0.3, client_buffer_events=10**9) as server:
        payload = json.dumps(body(stream=stream, n=2, logprobs=True, top_logprobs=20)).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(f"{CHAT}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            await wait_until(lambda: runner.steps > 100)
            await wait_until(lambda: server.connections == 0)


async def test_a_slow_reader_that_goes_on_reading_gets_everything() -> None:
    runner = ScriptedRunner(default="abcdefghij" * 30)
    with running_server(runner, client_timeout_s=0.2, client_buffer_events=10**9) as server:
        payload = json.dumps(body(n=8, logprobs=True, top_logprobs=20)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        head = f"{CHAT}Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        received = b""
        while data := await reader.read(1 << 16):
            received += data
            await asyncio.sleep(0.02)
        writer.close()
        assert len(json.loads(received.partition(b"\r\n\r\n")[2])["choices"]) == 8
        assert len(received) > 1 << 20


MALFORMED = {
    "rubbish": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5 + b"\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "bad version": b"GET / HTTP/9.9\r\n\r\n",
    "bad method": b"G\x01T / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bad header": b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    "nul in a header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "space before a colon": b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    "bad length": CHAT.encode() + b"Content-Length: many\r\n\r\n",
    "negative length": CHAT.encode() + b"Content-Length: -5\r\n\r\n",
    "two lengths": CHAT.encode() + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
    "length and chunks": CHAT.encode() + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": CHAT.encode() + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
    "bad chunk end": CHAT.encode() + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    "unknown coding": CHAT.encode() + b"Transfer-Encoding: cabbage\r\n\r\n",
    "bad target": b"GET http:///[:: HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "bad percent": b"GET /v1/models/%zz%ff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "a second request of rubbish": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\x01\x02\r\n\r\n",
    "bad gzip": CHAT.encode() + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
    "cut gzip": CHAT.encode()
    + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n"
    + gzip.compress(SMALL)[:20],
    "bad deflate": CHAT.encode()
    + b"Connection: close\r\nContent-Encoding: deflate\r\nContent-Length: 8\r\n\r\nabcdefgh",
    "a stranger's websocket": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    b"\x81\x05hello\r\n\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_requests_get_an_answer_and_no_traceback(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), running_server(ScriptedRunner(), client_timeout_s=0.5) as server:
        answer = await exchange(server, MALFORMED[kind])
        async with connected(server) as post:
            assert await status_of(post, body()) == 200
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert all(200 <= status < 500 for status in statuses), answer
    faults = [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]
    assert not faults, [record.getMessage() for record in faults]
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_a_connection_cut_in_the_middle_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), running_server(ScriptedRunner()) as server:
        for cut in (CHAT, CHAT + "Content-Length: 500\r\n\r\n{", CHAT + "Transfer-Encoding: chunked\r\n\r\n5\r\nab"):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(cut.encode())
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.transport.abort()
        async with connected(server) as post:
            assert await status_of(post, body()) == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.INFO]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_body_counts_as_what_it_unpacks_to(coding: str) -> None:
    pack = gzip.compress if coding == "gzip" else zlib.compress
    with running_server(ScriptedRunner(), max_body_bytes=100_000) as server:
        for data, status in ((SMALL, b"200"), (b" " * 50_000_000, b"413")):
            packed = pack(data)
            head = f"{CHAT}Connection: close\r\nContent-Encoding: {coding}\r\nContent-Length: {len(packed)}\r\n\r\n"
            answer = await exchange(server, head.encode() + packed)
            assert answer.split(maxsplit=2)[1] == status, answer[:200]


async def test_hundreds_of_idle_connections_stop_nobody() -> None:
    with running_server(ScriptedRunner(), client_timeout_s=30) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(400)]
        async with connected(server) as post:
            assert await status_of(post, body()) == 200
        for _, writer in idle:
            writer.transport.abort()
