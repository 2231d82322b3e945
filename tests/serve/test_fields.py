"""Every documented field of every API is honoured, a hint, or refused by name; nothing binding is dropped."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_type_hints

import aiohttp
import msgspec
import pytest

from serve import HttpServer
from serve.actor import Job
from serve.schemas import chat, completions, messages, responses, sampling
from serve.schemas.body import Hint, Refused
from tests.serve.test_structured import SCHEMA, fits

ASK = [{"role": "user", "content": "[words]"}]
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (chat.ChatRequest, {"messages": ASK}),
    "/v1/completions": (completions.CompletionRequest, {"prompt": "[words]"}),
    "/v1/responses": (responses.ResponsesRequest, {"input": "[words]"}),
    "/v1/messages": (messages.MessagesRequest, {"messages": ASK, "max_tokens": 500}),
}
OPENAI, ANTHROPIC = "openai.types", "anthropic.types"
# Where the client's type is, and ours.
TYPES: list[tuple[str, str, type[msgspec.Struct]]] = [
    (f"{OPENAI}.chat.completion_create_params", "CompletionCreateParamsBase", chat.ChatRequest),
    (f"{OPENAI}.chat", "ChatCompletionAssistantMessageParam", chat.ChatMessage),
    (f"{OPENAI}.chat", "ChatCompletionUserMessageParam", chat.ChatMessage),
    (f"{OPENAI}.chat", "ChatCompletionToolMessageParam", chat.ChatMessage),
    (f"{OPENAI}.chat", "ChatCompletionStreamOptionsParam", sampling.StreamOptions),
    (f"{OPENAI}.chat", "ChatCompletionFunctionToolParam", chat.ToolDefinition),
    (f"{OPENAI}.shared_params", "FunctionDefinition", chat.FunctionDefinition),
    (f"{OPENAI}.shared_params.response_format_json_schema", "JSONSchema", chat.JsonSchema),
    (f"{OPENAI}.completion_create_params", "CompletionCreateParamsBase", completions.CompletionRequest),
    (f"{OPENAI}.responses.response_create_params", "ResponseCreateParamsBase", responses.ResponsesRequest),
    (f"{OPENAI}.responses.response_create_params", "StreamOptions", sampling.StreamOptions),
    (f"{OPENAI}.responses", "ResponseTextConfigParam", responses.TextOptions),
    (f"{OPENAI}.responses", "FunctionToolParam", responses.FunctionTool),
    (f"{OPENAI}.shared_params", "Reasoning", responses.ReasoningOptions),
    (f"{ANTHROPIC}.message_create_params", "MessageCreateParamsBase", messages.MessagesRequest),
    (f"{ANTHROPIC}.message_count_tokens_params", "MessageCountTokensParams", messages.CountRequest),
    (ANTHROPIC, "OutputConfigParam", messages.OutputConfig),
    (ANTHROPIC, "JSONOutputFormatParam", messages.OutputFormat),
    (ANTHROPIC, "ToolParam", messages.ClientTool),
    (ANTHROPIC, "ThinkingConfigEnabledParam", messages.Thinking),
    (ANTHROPIC, "ThinkingConfigAdaptiveParam", messages.Thinking),
    (ANTHROPIC, "TextBlockParam", messages.MessageBlock),
    (ANTHROPIC, "TextBlockParam", messages.SystemBlock),
    (ANTHROPIC, "ThinkingBlockParam", messages.MessageBlock),
    (ANTHROPIC, "ToolUseBlockParam", messages.MessageBlock),
    (ANTHROPIC, "ToolResultBlockParam", messages.MessageBlock),
]


async def post(server: HttpServer, path: str, body: Any) -> tuple[int, Any]:
    """Status and JSON, or the text of a stream."""
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


@pytest.mark.parametrize(("module", "name", "ours"), TYPES)
def test_every_field_of_the_clients_is_known(module: str, name: str, ours: type[msgspec.Struct]) -> None:
    pytest.importorskip(module.split(".")[0])
    theirs = getattr(importlib.import_module(module), name)
    assert set(theirs.__annotations__) <= {field.encode_name for field in msgspec.structs.fields(ours)} | {"type"}


def fields_of(kind: type[msgspec.Struct], wanted: Any) -> set[str]:
    """Fields that are a Hint, or may be Refused."""
    hints = get_type_hints(kind, include_extras=True)
    return {name for name, hint in hints.items() if hint == wanted or wanted in getattr(hint, "__args__", ())}


REFUSED = [(path, name) for path, (kind, _) in BODIES.items() for name in sorted(fields_of(kind, Refused))]
HINTS = [(path, name) for path, (kind, _) in BODIES.items() for name in sorted(fields_of(kind, Hint))]


@pytest.mark.parametrize(("path", "name"), REFUSED)
async def test_what_is_not_implemented_is_refused_by_name(server: HttpServer, path: str, name: str) -> None:
    _, body = BODIES[path]
    for value in (1, True, "x", {"id": "x"}, [{"type": "x"}]):
        status, answer = await post(server, path, body | {name: value})
        assert status == 400 and answer["error"]["message"].startswith(f"{name}: "), answer
        assert path == "/v1/messages" or answer["error"]["param"] == name
    for value in (None, False, [], {}, ""):
        assert (await post(server, path, body | {name: value}))[0] == 200


@pytest.mark.parametrize("path", BODIES)
async def test_hints_change_nothing(server: HttpServer, path: str) -> None:
    kind, body = BODIES[path]
    plain = text_of((await post(server, path, body))[1])
    for value in (None, True, "x", {"id": "x"}, ["x"], 5):
        status, answer = await post(server, path, body | dict.fromkeys(fields_of(kind, Hint), value))
        assert (status, text_of(answer)) == (200, plain)


def text_of(answer: Any) -> str:
    """An answer's text, in whatever API."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    return str((answer["output"][-1]["content"] if "output" in answer else answer["content"])[0]["text"])


@pytest.fixture
def jobs(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """What reaches the engine."""
    seen: list[Job] = []
    submit = server.service.actor.submit

    def record(new: list[Job]) -> None:
        seen.extend(new)
        submit(new)

    monkeypatch.setattr(server.service.actor, "submit", record)
    yield seen


Check = Callable[[SimpleNamespace], object]


def param(name: str, value: object) -> Check:
    return lambda seen: getattr(seen.jobs[0].params, name) == value


def prompt_has(text: str) -> Check:
    return lambda seen: text.encode() in bytes(min(token, 255) for token in seen.jobs[0].prompt_ids)


def tool(**fields: Any) -> dict[str, Any]:
    return {"name": "look_up", "description": "It finds", **fields}


CHAT_TOOL = {"type": "function", "function": tool(parameters=SCHEMA)}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TEXT_FORMAT = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
CLAUDE_TOOL = tool(input_schema=SCHEMA)
SAMPLING: dict[str, tuple[dict[str, Any], Check]] = {
    "model": ({"model": "other"}, lambda seen: seen.status == 404),
    "temperature": ({"temperature": 0.25}, param("temperature", 0.25)),
    "top_p": ({"top_p": 0.5}, param("top_p", 0.5)),
    "top_k": ({"top_k": 7}, param("top_k", 7)),
    "seed": ({"seed": 9}, param("seed", 9)),
    "stream": ({"stream": True}, lambda seen: seen.answer.startswith(("data:", "event:"))),
    "cache_salt": ({"cache_salt": "s"}, lambda seen: seen.jobs[0].cache_salt == "s"),
    "routed_dp_rank": ({"routed_dp_rank": 1}, lambda seen: seen.status == 400),
}
OPENAI_SAMPLING: dict[str, tuple[dict[str, Any], Check]] = SAMPLING | {
    "n": ({"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "max_tokens": ({"max_tokens": 3}, param("max_output_tokens", 3)),
    "stop": ({"stop": "quick", "max_tokens": 30}, lambda seen: text_of(seen.answer) == "The "),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda seen: '"usage":{"prompt' in seen.answer,
    ),
    "presence_penalty": ({"presence_penalty": 1}, param("presence_penalty", 1)),
    "frequency_penalty": ({"frequency_penalty": 1}, param("frequency_penalty", 1)),
    "logit_bias": ({"logit_bias": {"65": 2}}, param("logit_bias", {65: 2.0})),
    "min_p": ({"min_p": 0.1}, param("min_p", 0.1)),
    "repetition_penalty": ({"repetition_penalty": 1.5}, param("repetition_penalty", 1.5)),
    "min_tokens": ({"min_tokens": 4, "max_tokens": 9}, param("min_output_tokens", 4)),
    "ignore_eos": ({"ignore_eos": True, "max_tokens": 60}, param("ignore_stop", True)),
    "stop_token_ids": ({"stop_token_ids": [66]}, lambda seen: 66 in seen.jobs[0].params.stop_token_ids),
}
HONOURED: dict[str, dict[str, tuple[dict[str, Any], Check]]] = {
    "/v1/chat/completions": OPENAI_SAMPLING
    | {
        "messages": ({"messages": [*ASK, *ASK]}, prompt_has("[words]")),
        "max_completion_tokens": ({"max_completion_tokens": 3}, param("max_output_tokens", 3)),
        "logprobs": ({"logprobs": True}, lambda seen: seen.answer["choices"][0]["logprobs"]["content"]),
        "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, param("logprobs", 2)),
        "tools": ({"tools": [CHAT_TOOL]}, prompt_has("It finds")),
        "tool_choice": ({"tools": [CHAT_TOOL], "tool_choice": "none"}, lambda seen: not prompt_has("It finds")(seen)),
        "parallel_tool_calls": (
            {"tools": [CHAT_TOOL], "parallel_tool_calls": False},
            lambda seen: seen.jobs[0].params.allowed_tokens,
        ),
        "response_format": ({"response_format": FORMAT}, lambda seen: fits(json.loads(text_of(seen.answer)))),
        "modalities": ({"modalities": ["audio"]}, lambda seen: seen.status == 400),
        "function_call": ({"function_call": {"name": "x"}}, lambda seen: seen.status == 400),
        "reasoning_effort": ({"reasoning_effort": "none"}, lambda seen: seen.jobs[0].prompt_ids[-3] > 255),
        "chat_template_kwargs": (
            {"chat_template_kwargs": {"enable_thinking": False}},
            lambda seen: seen.jobs[0].prompt_ids[-3] > 255,
        ),
    },
    "/v1/completions": OPENAI_SAMPLING
    | {
        "prompt": ({"prompt": [65, 66]}, lambda seen: seen.jobs[0].prompt_ids == [65, 66]),
        "echo": ({"echo": True}, lambda seen: text_of(seen.answer).startswith("[words]The")),
        "logprobs": ({"logprobs": 1}, param("logprobs", 1)),
        "best_of": ({"best_of": 3}, lambda seen: seen.status == 400),
    },
    "/v1/responses": SAMPLING
    | {
        "input": ({"input": "[think]"}, lambda seen: text_of(seen.answer) == "Forty-two."),
        "instructions": ({"instructions": "Be brief"}, prompt_has("Be brief")),
        "previous_response_id": ({"previous_response_id": "x"}, lambda seen: seen.status == 404),
        "store": ({"store": False}, lambda seen: seen.answer["store"] is False),
        "stream_options": ({"stream_options": 5}, lambda seen: seen.status == 400),
        "max_output_tokens": ({"max_output_tokens": 3}, param("max_output_tokens", 3)),
        "top_logprobs": ({"top_logprobs": 2}, param("logprobs", 2)),
        "include": ({"include": ["message.output_text.logprobs"]}, param("logprobs", 0)),
        "tools": ({"tools": [{"type": "function", **tool(parameters=SCHEMA)}]}, prompt_has("It finds")),
        "tool_choice": ({"tool_choice": "required"}, lambda seen: seen.status == 400),
        "parallel_tool_calls": (
            {"tools": [{"type": "function", **tool()}], "parallel_tool_calls": False},
            lambda seen: seen.jobs[0].params.allowed_tokens,
        ),
        "text": ({"text": TEXT_FORMAT}, lambda seen: fits(json.loads(text_of(seen.answer)))),
        "reasoning": ({"reasoning": {"effort": "none"}}, lambda seen: seen.jobs[0].prompt_ids[-3] > 255),
        "metadata": ({"metadata": {"a": "b"}}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
        "truncation": ({"truncation": "auto"}, lambda seen: seen.status == 400),
        "user": ({"user": "u"}, lambda seen: seen.answer["user"] == "u"),
        "stop": ({"stop": "quick"}, lambda seen: text_of(seen.answer) == "The "),
    },
    "/v1/messages": SAMPLING
    | {
        "messages": ({"messages": [*ASK, *ASK]}, prompt_has("[words]")),
        "max_tokens": ({"max_tokens": 3}, param("max_output_tokens", 3)),
        "system": ({"system": "Be brief"}, prompt_has("Be brief")),
        "stop_sequences": ({"stop_sequences": ["quick"]}, lambda seen: text_of(seen.answer) == "The "),
        "tools": ({"tools": [CLAUDE_TOOL]}, prompt_has("It finds")),
        "tool_choice": (
            {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "none"}},
            lambda seen: not prompt_has("It finds")(seen),
        ),
        "thinking": (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            lambda seen: seen.jobs[0].prompt_ids[-3] < 256,
        ),
        "output_config": (
            {"output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}},
            lambda seen: fits(json.loads(text_of(seen.answer))),
        ),
        "speed": ({"speed": "fast"}, lambda seen: seen.status == 400),
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_each_field_is_one_of_the_three(path: str) -> None:
    kind, _ = BODIES[path]
    refused, hints, honoured = fields_of(kind, Refused), fields_of(kind, Hint), set(HONOURED[path])
    assert not refused & hints and not (refused | hints) & honoured
    assert refused | hints | honoured == set(kind.__struct_fields__)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, table in HONOURED.items() for name in table])
async def test_a_field_that_is_honoured_shows(server: HttpServer, jobs: list[Job], path: str, name: str) -> None:
    change, check = HONOURED[path][name]
    status, answer = await post(server, path, BODIES[path][1] | change)
    seen = SimpleNamespace(status=status, answer=answer, jobs=jobs)
    assert check(seen), (status, answer)
