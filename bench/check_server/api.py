"""A plain client of an OpenAI-compatible server: it keeps what a client library would smooth over."""

from __future__ import annotations

import io
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.check_server.outcome import Failed, Skipped, require

REFUSALS = (400, 404, 405, 415, 422, 501)
"""How servers say that they do not know a field or an endpoint."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    data: bytes

    def json(self) -> Any:
        """Raises Failed if the body is no JSON."""
        try:
            return json.loads(self.data)
        except ValueError:
            raise Failed(f"status {self.status}, and the body is no JSON: {self.excerpt}") from None

    def ok(self) -> Any:
        """The body of a success; raises Failed for anything else."""
        require(self.status == 200, f"status {self.status}: {self.excerpt}")
        return self.json()

    def offered(self, what: str) -> Any:
        """The body of a success; raises Skipped where the server refuses the request."""
        if self.status in REFUSALS:
            raise Skipped(f"{what}: the server answers {self.status}")
        return self.ok()

    @property
    def excerpt(self) -> str:
        return self.data[:150].decode(errors="replace")


@dataclass(slots=True)
class Stream:
    """A streamed answer, event by event.

    Attributes:
        events: arrival in seconds after the request was sent, and the JSON object.
        has_done: whether `data: [DONE]` came.
        after_done: events that came after it.
    """

    status: int
    content_type: str
    events: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    has_done: bool = False
    after_done: int = 0
    refusal: bytes = b""

    def offered(self, what: str) -> Stream:
        """Itself; raises Skipped where the server refuses the request, Failed where it breaks."""
        if self.status in REFUSALS:
            raise Skipped(f"{what}: the server answers {self.status}")
        return self.ok()

    def ok(self) -> Stream:
        """Itself; raises Failed unless it is a stream without errors that was brought to its end."""
        require(self.status == 200, f"status {self.status}: {self.refusal[:150].decode(errors='replace')}")
        errors = [event["error"] for _, event in self.events if "error" in event]
        require(not errors, f"the stream holds an error: {errors[:1]}")
        require(self.has_done, "the stream does not end with data: [DONE]")
        return self


class Api:
    """One server, one model."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self.session = session
        self.url = url
        self.model = model

    async def get(self, path: str) -> Reply:
        async with self.session.get(self.url + path) as response:
            return await _read(response)

    async def post(self, path: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=io.BytesIO(data), headers=sent) as response:
            return await _read(response)

    async def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """Sends a streaming request and reads it to its end.

        Raises:
            Failed: a line that is not UTF-8, or an event that is not a JSON object.
        """
        started = time.perf_counter()
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            stream = Stream(response.status, response.headers.get("Content-Type", ""))
            if response.status != 200:
                stream.refusal = await response.read()
                return stream
            async for line in response.content:
                if line.startswith(b"data:"):
                    _take_event(stream, line[5:].strip(), time.perf_counter() - started)
            return stream

    def chat_body(self, text: str, *, max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
        """A greedy chat request with one message; `fields` are added to the body."""
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}

    def completion_body(self, prompt: str | list[int], *, max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
        """A greedy completion request."""
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}

    async def chat(self, text: str, **fields: Any) -> Reply:
        return await self.post(CHAT, self.chat_body(text, **fields))

    async def complete(self, prompt: str, **fields: Any) -> Reply:
        return await self.post(COMPLETIONS, self.completion_body(prompt, **fields))


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def _read(response: aiohttp.ClientResponse) -> Reply:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status, headers, await response.read())


def _take_event(stream: Stream, data: bytes, at_s: float) -> None:
    if stream.has_done:
        stream.after_done += 1
        return
    if data == b"[DONE]":
        stream.has_done = True
        return
    try:
        event = json.loads(data.decode())
    except UnicodeDecodeError:
        raise Failed(f"a line of the stream is not UTF-8: {data[:80]!r}") from None
    except ValueError:
        raise Failed(f"an event of the stream is no JSON: {data[:80]!r}") from None
    require(isinstance(event, dict), f"an event of the stream is no object: {data[:80]!r}")
    stream.events.append((at_s, event))
