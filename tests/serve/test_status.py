"""`/health`: what it says of the server."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner


async def health_of(server: HttpServer) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession(server.url) as session, session.get("/health") as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("limit", "longest"), [(512, 512), (None, 4095), (100_000, 4095)])
async def test_health_tells_the_longest_answer(limit: int | None, longest: int) -> None:
    with running_server(ScriptedRunner(), max_output_tokens=limit) as server:
        status, state = await health_of(server)
    assert status == 200
    assert state["max_output_tokens"] == longest
