"""What nobody waits for: clients that take nothing of what is sent to them, and an engine that makes no step."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from serve.actor import EngineActor
from serve.config import ServerConfig

_LOG = logging.getLogger("resin.serve")

_LOOKS_PER_LIMIT = 8
_SHORTEST_S, _LONGEST_S = 0.01, 1.0


class Watch:
    """Looks again and again, as long as the server runs."""

    def __init__(self, connections: web.Server, actor: EngineActor, config: ServerConfig) -> None:
        self._connections = connections
        self._actor = actor
        self._config = config
        self._waiting: dict[asyncio.Transport, tuple[int, float]] = {}  # least bytes that waited, and since when
        self._is_stalled = False

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        limit_s = min(self._config.client_timeout_s, self._config.stall_timeout_s)
        while True:
            await asyncio.sleep(min(max(limit_s / _LOOKS_PER_LIMIT, _SHORTEST_S), _LONGEST_S))
            self._look_at_clients(time.monotonic())
            self._look_at_engine()

    def _look_at_clients(self, now_s: float) -> None:
        waiting: dict[asyncio.Transport, tuple[int, float]] = {}
        for connection in self._connections.connections:
            transport = connection.transport
            size = transport.get_write_buffer_size() if isinstance(transport, asyncio.Transport) else 0
            if not size:
                continue
            assert isinstance(transport, asyncio.Transport)
            least, since_s = self._waiting.get(transport, (size, now_s))
            if size < least:
                least, since_s = size, now_s
            if now_s - since_s > self._config.client_timeout_s:
                transport.abort()
            else:
                waiting[transport] = (least, since_s)
        self._waiting = waiting

    def _look_at_engine(self) -> None:
        was_stalled, self._is_stalled = self._is_stalled, self._actor.is_stalled
        if self._is_stalled and not was_stalled:
            age_s, active = self._actor.step_age_s, self._actor.active
            _LOG.error(
                "no step for %.0f s while %d choices run: the runner hangs, or a step takes very long", age_s, active
            )
        elif was_stalled and not self._is_stalled:
            _LOG.warning("the engine makes steps again")
