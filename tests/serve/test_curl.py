"""What a person types into a shell."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from serve import HttpServer
from tests.serve.conftest import WORDS

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("curl", "-sS", "-N", *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_chat(server: HttpServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "[words]"}]})
    answer = json.loads(await curl(f"{server.url}/v1/chat/completions", "--json", body))
    assert answer["choices"][0]["message"]["content"] == WORDS


async def test_stream(server: HttpServer) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "[words]"}], "stream": True})
    output = await curl("-D", "-", f"{server.url}/v1/chat/completions", "--json", body)
    head, _, events = output.partition("\r\n\r\n")
    assert "content-type: text/event-stream" in head.lower()
    lines = [line for line in events.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == WORDS


async def test_health_models_and_metrics(server: HttpServer) -> None:
    assert json.loads(await curl(f"{server.url}/health"))["status"] == "ok"
    assert json.loads(await curl(f"{server.url}/v1/models"))["data"][0]["id"] == "scripted"
    text = await curl(f"{server.url}/metrics")
    assert "resin_http_requests_total" in text
    assert 'resin_http_limit{name="max_active_sessions"} 256.0' in text
