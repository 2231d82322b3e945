"""The worst gap of a running stream while others send whatever they like."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_GAP_S = 0.5
CHAT, RAW = "/v1/chat/completions", "/v1/completions"
WORDS = " ".join(f"the {number} quick brown foxes jump, and" for number in range(420_000))
MEGABYTE = 1 << 20


class RunningServer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        line = ""
        while "is ready at" not in line:
            line = process.stderr.readline()
            assert line, "the server did not start"
        self.port = int(line.rpartition(":")[2])
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(process.stderr or []), daemon=True).start()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def open(self, path: str, data: bytes) -> socket.socket:
        connection = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        with contextlib.suppress(ConnectionError):  # refused before all of it came
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def status_of(self, path: str, data: bytes) -> int:
        """Sends a request, reads the whole answer and returns its status."""
        with self.open(path, data) as connection:
            head = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 20):
                    head = head or part
        return int(head.split(maxsplit=2)[1]) if head else 0


class Watched:
    """A stream that is read all the time."""

    def __init__(self, server: RunningServer) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200_000, "stream": True}
        self._connection = server.open(CHAT, json.dumps(body).encode())
        self._times: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(1 << 16):
                self._times.append(time.monotonic())

    def wait(self) -> None:
        """Until it runs."""
        deadline = time.monotonic() + 20
        while len(self._times) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def worst_gap_s(self, since_s: float) -> float:
        times = [since_s, *(at_s for at_s in self._times if at_s >= since_s), time.monotonic()]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.gap_server", "--quiet"], cwd=root, stderr=subprocess.PIPE, text=True
    )
    try:
        yield RunningServer(process)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2} | fields).encode()


def question(text: str) -> bytes:
    return chat(messages=[{"role": "user", "content": text}])


def tools(count: int, properties: int) -> bytes:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": i + 1} for i in range(properties)},
    }
    functions = [{"name": f"f{i}", "description": "d" * 200, "parameters": schema} for i in range(count)]
    return chat(tools=[{"type": "function", "function": function} for function in functions])


def grammar(number: int) -> bytes:
    names = [f"p{number}_{i}" for i in range(200)]
    schema = {"type": "object", "properties": {name: {"enum": [name, "b", "c"]} for name in names}, "required": names}
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})


def repeated(before: str, part: str, size: int, after: str) -> bytes:
    return (before + ",".join([part] * (size // (len(part) + 1))) + after).encode()


KWARGS = '{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"chat_template_kwargs":{"a":['
MESSAGE = '{"role":"user","content":"a"}'

# Kind -> path, one or more bodies to send at once, and the status that each gets.
QUICK: dict[str, tuple[str, Callable[[], list[bytes]], int]] = {
    "a long question": (CHAT, lambda: [question(WORDS[:MEGABYTE])], 400),
    "a long question of control characters": (CHAT, lambda: [question("<|" * (MEGABYTE // 2))], 400),
    "a long raw prompt": (RAW, lambda: [json.dumps({"prompt": WORDS[:MEGABYTE]}).encode()], 400),
    "a long text to tokenize": (
        "/tokenize",
        lambda: [json.dumps({"prompt": WORDS[: MEGABYTE // 2], "return_token_strs": True}).encode()],
        200,
    ),
    "many ids to read": ("/detokenize", lambda: [repeated('{"tokens":[', "65", MEGABYTE, "]}")], 200),
    "many messages": (CHAT, lambda: [repeated('{"max_tokens":2,"messages":[', MESSAGE, MEGABYTE // 4, "]}")], 200),
    "many messages to count": (
        "/v1/messages/count_tokens",
        lambda: [repeated('{"model":"","messages":[', MESSAGE, MEGABYTE // 2, "]}")],
        200,
    ),
    "large tools": (CHAT, lambda: [tools(8, 500)], 200),
    "sixty-four grammars": (CHAT, lambda: [grammar(number) for number in range(64)], 200),
    "lists of nothing": (CHAT, lambda: [repeated(KWARGS, "[]", 15 * MEGABYTE, "]}}")], 413),
    "half a million ids": (RAW, lambda: [repeated('{"prompt":[', "1", MEGABYTE, "]}")], 400),
    "ids without end": (RAW, lambda: [repeated('{"prompt":[', "1", 15 * MEGABYTE, "]}")], 413),
    "alternatives for every token": (CHAT, lambda: [chat(n=8, logprobs=True, top_logprobs=20, max_tokens=200)], 200),
    "alternatives for a prompt": (
        RAW,
        lambda: [
            json.dumps({"prompt": WORDS[:30_000], "max_tokens": 1, "echo": True, "logprobs": 5, "stream": s}).encode()
            for s in (True, False)
        ],
        200,
    ),
}
SLOW: dict[str, tuple[str, Callable[[], list[bytes]], int]] = {
    "15 MB of question": (CHAT, lambda: [question(WORDS[: 15 * MEGABYTE])], 400),
    "15 MB without a space": (CHAT, lambda: [question("a" * (15 * MEGABYTE))], 400),
    "15 MB of escapes": (CHAT, lambda: [question("\u00e9" * (15 * MEGABYTE // 6))], 400),
    "15 MB of raw prompt": (RAW, lambda: [json.dumps({"prompt": WORDS[: 15 * MEGABYTE]}).encode()], 400),
    "15 MB to tokenize": ("/tokenize", lambda: [json.dumps({"prompt": WORDS[: 15 * MEGABYTE]}).encode()], 400),
    "15 MB of tools": (CHAT, lambda: [tools(200, 1200)], 400),
    "15 MB of unknown fields": (CHAT, lambda: [chat(zzz=[[]] * 100_000 + ["a" * (14 * MEGABYTE)])], 200),
    "a long answer with alternatives": (
        CHAT,
        lambda: [chat(n=16, logprobs=True, top_logprobs=20, max_tokens=2000)],
        200,
    ),
    "two hundred questions": (CHAT, lambda: [question(WORDS[i : i + 20_000]) for i in range(200)], 200),
}


def check(server: RunningServer, attack: Callable[[], None]) -> None:
    """A machine that others use may stop both sides for a moment: what is slow by itself is slow each time."""
    gaps = []
    for _ in range(3):
        watched = Watched(server)
        try:
            watched.wait()
            started_s = time.monotonic()
            attack()
            time.sleep(0.1)
            gaps.append(watched.worst_gap_s(started_s))
        finally:
            watched.close()
        if gaps[-1] <= MOST_GAP_S:
            break
    print("worst gaps:", *(f"{gap:.3f} s" for gap in gaps))
    assert min(gaps) <= MOST_GAP_S, gaps


def send_all(server: RunningServer, path: str, bodies: list[bytes], expected: int) -> None:
    statuses: list[int] = []
    senders = [
        threading.Thread(target=lambda body=body: statuses.append(server.status_of(path, body)))  # type: ignore[misc]
        for body in bodies
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert statuses == [expected] * len(bodies)


@pytest.mark.parametrize("kind", QUICK)
def test_no_request_stops_a_stream(server: RunningServer, kind: str) -> None:
    path, build, expected = QUICK[kind]
    bodies = build()
    check(server, lambda: send_all(server, path, bodies, expected))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW)
def test_no_huge_request_stops_a_stream(server: RunningServer, kind: str) -> None:
    path, build, expected = SLOW[kind]
    bodies = build()
    check(server, lambda: send_all(server, path, bodies, expected))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_idle_connections_stop_no_stream(server: RunningServer, count: int, start: bytes) -> None:
    def attack() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(server.connect())
                if start:
                    connection.sendall(start)

    check(server, attack)


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_clients_that_leave_stop_no_stream(server: RunningServer, count: int) -> None:
    body = chat(stream=True, max_tokens=100_000)

    def attack() -> None:
        connections = [server.open(CHAT, body) for _ in range(count)]
        for connection in connections:
            with connection:
                connection.recv(10)

    check(server, attack)


def test_nothing_was_said_of_any_of_it(server: RunningServer) -> None:
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line], server.log
