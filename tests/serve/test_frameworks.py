"""Client libraries and an agent framework; each is skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from serve import HttpServer
from tests.serve.conftest import WORDS

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
KIND = {
    "type": "object",
    "properties": {"kind": {"type": "boolean"}},
    "required": ["kind"],
    "additionalProperties": False,
}


def test_litellm(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    openai: dict[str, Any] = {"model": "openai/scripted", "api_base": f"{server.url}/v1", "api_key": "x"}
    words = [{"role": "user", "content": "[words]"}]
    assert litellm.completion(messages=words, **openai).choices[0].message.content == WORDS
    chunks = litellm.completion(messages=words, stream=True, **openai)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WORDS
    answer = litellm.completion(messages=[{"role": "user", "content": "[call]"}], tools=[TOOL], **openai)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert litellm.responses(input="[words]", **openai).output[0].content[0].text == WORDS
    anthropic = {"model": "anthropic/scripted", "api_base": server.url, "api_key": "x", "max_tokens": 500}
    assert litellm.completion(messages=words, **anthropic).choices[0].message.content == WORDS


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_pydantic_ai_runs_a_tool_loop(server: HttpServer, api: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    agent = pydantic_ai.Agent(_model(server, api))
    cities: list[str] = []

    @agent.tool_plain
    def weather(city: str) -> str:
        cities.append(city)
        return "[words]"

    assert agent.run_sync("[call]").output == WORDS
    assert cities == ["Bonn"]


def test_pydantic_ai_gets_structured_output(server: HttpServer) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    output = pydantic_ai.NativeOutput(pydantic_ai.StructuredDict(KIND, name="kind"))
    assert pydantic_ai.Agent(_model(server, "chat"), output_type=output).run_sync("x").output == {"kind": True}


def _model(server: HttpServer, api: str) -> Any:
    if api == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("scripted", provider=AnthropicProvider(base_url=server.url, api_key="x"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind("scripted", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="x"))
