"""Server-sent events to one client."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from serve.generation import Update
from serve.service import service_of
from serve.session import Choice, Session

_ENCODER = msgspec.json.Encoder()


def encode_events(items: Iterable[dict[str, Any]]) -> bytes:
    """JSON objects as events."""
    return b"".join([b"data: " + _ENCODER.encode(item) + b"\n\n" for item in items])


def encode_named(items: Iterable[dict[str, Any]]) -> bytes:
    """The same, each under the name that is its `type`."""
    return b"".join([b"event: " + item["type"].encode() + b"\n" + encode_events((item,)) for item in items])


class EventTemplate:
    """An event of which one string changes: `fill` gives the bytes that encoding the whole of it would."""

    def __init__(self, build: Callable[[str], dict[str, Any]]) -> None:
        marker = secrets.token_hex()
        self._head, self._tail = encode_events([build(marker)]).split(_ENCODER.encode(marker))

    def fill(self, text: str) -> bytes:
        return self._head + _ENCODER.encode(text) + self._tail


class EventStream:
    """The response of a streaming request; its headers go out with the first event."""

    def __init__(self, request: web.Request, session: Session) -> None:
        self._request = request
        self._protocol = request.protocol
        self._session = session
        self._response: web.StreamResponse | None = None
        self._writer: AbstractStreamWriter | None = None
        self._is_chunked = False
        self._held = b""  # what came before the headers

    @property
    def has_started(self) -> bool:
        return self._response is not None

    async def forward(
        self, encode: Callable[[Choice, Update], bytes], is_long: Callable[[Choice], bool] = lambda choice: False
    ) -> None:
        """Sends what `encode` makes of every update, until all choices have ended.

        Args:
            encode: an update as bytes.
            is_long: whether that takes long for a choice's next update, which is then encoded aside.

        Raises:
            ApiError: see Session.deliver.
            ConnectionResetError: the client is gone.
        """
        put = self._put
        aside = service_of(self._request).aside
        waiting: list[tuple[Choice, Update]] = []

        def take(choice: Choice, update: Update) -> bool:
            if is_long(choice):
                waiting.append((choice, update))
                return True
            return put(encode(choice, update))

        async def drain() -> None:
            while waiting:
                put(await aside.run(math.inf, encode, *waiting.pop()))
            await self._drain()

        await self._session.deliver(take, drain)

    async def send(self, data: bytes) -> None:
        """Sends events.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self._put(data):
            await self._drain()

    async def close(self, last: bytes = b"") -> web.StreamResponse:
        """Sends the last bytes and ends the response."""
        await self.send(last)
        response = self._response or await self._start()
        with self._session.sending():
            await response.write_eof()
        return response

    def _put(self, data: bytes) -> bool:
        """Writes without waiting. True if nothing more should come before `_drain`."""
        if not data:
            return False
        if self._writer is None:
            self._held += data
            return True
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        # Past the response object, whose `write` could wait: every token of every client comes through here.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return self._protocol.writing_paused

    async def _drain(self) -> None:
        if self._writer is None:
            await self._start()
        assert self._writer is not None
        with self._session.sending():
            await self._writer.drain()

    async def _start(self) -> web.StreamResponse:
        response = self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
        )
        # Proxies that buffer would turn the stream into one late answer.
        response.headers["X-Accel-Buffering"] = "no"
        writer = await response.prepare(self._request)
        self._is_chunked = response.headers.get("Transfer-Encoding") == "chunked"
        await response.write(self._held)
        self._writer = writer
        return response
