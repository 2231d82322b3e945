"""Requests that do not say how to sample get the server's defaults, whatever API they speak."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from resin import Engine, SamplingParams
from resin.models.sampling_defaults import SamplingDefaults
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.mark.parametrize("path", BODIES)
async def test_defaults_are_those_of_the_server(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []
    submit = Engine.submit

    def spy(self: Engine, *args: Any, sampling_params: SamplingParams, **options: Any) -> Any:
        seen.append(sampling_params)
        return submit(self, *args, sampling_params=sampling_params, **options)

    monkeypatch.setattr(Engine, "submit", spy)
    chosen = SamplingDefaults(temperature=0.3, top_p=0.8, top_k=7, repetition_penalty=1.1, max_output_tokens=512)
    with running_server(ScriptedRunner(), sampling=chosen) as server:
        async with aiohttp.ClientSession(server.url) as session:
            for extra in ({}, {"temperature": 1.5, "top_p": 1.0}):
                async with session.post(path, json=BODIES[path] | extra) as response:
                    assert response.status == 200, await response.text()
            async with session.get("/health") as response:
                state = await response.json()
                assert (state["sampling"], state["answer_tokens"]) == (chosen.params(), 512)
    silent, said = seen
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (0.3, 0.8, 7, 1.1)
    assert (said.temperature, said.top_p, said.top_k, said.repetition_penalty) == (1.5, 1.0, 7, 1.1)
