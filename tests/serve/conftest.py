"""One scripted server for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WORDS = "The quick brown fox jumps over the lazy dog. Größe: 😀!"


@pytest.fixture(scope="session")
def server() -> Iterator[HttpServer]:
    runner = ScriptedRunner()
    runner.answer("[think]", "<think>\nLet me see.\n</think>\n\nForty-two.")
    runner.answer("[call]", "Looking." + CALL)
    runner.answer("[think and call]", "<think>\nHm.\n</think>\n\nWait." + CALL)
    runner.answer("[calls]", CALL + "\n" + CALL)
    runner.answer("[words]", WORDS)
    runner.answer("[start a call]", "<tool_call>")
    runner.answer("[long]", "abcdefghij" * 300)
    with running_server(runner) as running:
        yield running


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
