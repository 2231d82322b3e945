"""Server-sent events to one client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from serve.session import Session

_ENCODER = msgspec.json.Encoder()


class EventStream:
    """The response of a streaming request; its headers go out with the first event."""

    def __init__(self, request: web.Request, session: Session) -> None:
        self._request = request
        self._session = session
        self._response: web.StreamResponse | None = None

    @property
    def has_started(self) -> bool:
        return self._response is not None

    async def send(self, items: Sequence[dict[str, Any]]) -> None:
        """Sends JSON objects in one write.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if items:
            await self._write(b"".join(b"data: " + _ENCODER.encode(item) + b"\n\n" for item in items))

    async def send_named(self, items: Sequence[dict[str, Any]]) -> None:
        """The same, each under the name that is its `type`."""
        if items:
            lines = ((item["type"].encode(), _ENCODER.encode(item)) for item in items)
            await self._write(b"".join(b"event: " + name + b"\ndata: " + data + b"\n\n" for name, data in lines))

    async def close(self, last: bytes = b"") -> web.StreamResponse:
        """Sends the last bytes and ends the response."""
        if last or self._response is None:
            await self._write(last)
        assert self._response is not None
        with self._session.sending():
            await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
            )
            # Proxies that buffer would turn the stream into one late answer.
            self._response.headers["X-Accel-Buffering"] = "no"
            await self._response.prepare(self._request)
        with self._session.sending():
            await self._response.write(data)
