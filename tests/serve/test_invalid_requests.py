"""Requests that cannot be answered get a 4xx that names the field."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve import HttpServer
from serve.errors import ApiError
from serve.schemas.body import decode_body
from serve.schemas.chat import ChatRequest, to_messages
from serve.schemas.completions import CompletionRequest
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

MESSAGES = [{"role": "user", "content": "x"}]


async def post(server: HttpServer, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}, {"role": "judge", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"routed_dp_rank": 1}, "routed_dp_rank"),
        ({"messages": [{"role": "user", "content": "y" * 5000}]}, "messages"),
    ],
)
async def test_the_field_is_named(server: HttpServer, change: dict[str, Any], param: str) -> None:
    body = {"model": "scripted", "messages": MESSAGES} | change
    status, answer = await post(server, "/v1/chat/completions", body)
    assert status == 400, answer
    error = answer["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_missing_field(server: HttpServer) -> None:
    status, answer = await post(server, "/v1/chat/completions", {"model": "scripted"})
    assert (status, answer["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"nul", b'{"messages": ' + b"[" * 20_000])
async def test_broken_json(server: HttpServer, data: bytes) -> None:
    status, answer = await post(server, "/v1/chat/completions", data)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": "y" * 5000}, "prompt"),
        ({"prompt": ["x"] * 300}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
)
async def test_completions_name_the_field(server: HttpServer, change: dict[str, Any], param: str) -> None:
    status, answer = await post(server, "/v1/completions", {"model": "scripted", "prompt": "x"} | change)
    assert status == 400, answer
    assert answer["error"]["param"] == param


async def test_unknown_model_path_method_and_rank(server: HttpServer) -> None:
    status, answer = await post(server, "/v1/chat/completions", {"model": "gpt-9", "messages": MESSAGES})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await post(server, "/v1/nothing", {}))[0] == 404
    assert (await post(server, "/v1/models", {}))[0] == 405
    headers = {"resin-routed-dp-rank": "3"}
    status, answer = await post(server, "/v1/chat/completions", {"messages": MESSAGES}, headers)
    assert (status, answer["error"]["param"]) == (400, "resin-routed-dp-rank")


async def test_more_choices_than_the_queue_holds_can_never_run() -> None:
    with running_server(ScriptedRunner(), request_queue_capacity=3) as server:
        status, answer = await post(server, "/v1/completions", {"prompt": ["x", "y"], "n": 2})
        assert (status, answer["error"]["param"]) == (400, "n")


async def test_body_size_output_limit_and_api_key() -> None:
    with running_server(ScriptedRunner(), max_body_bytes=2000, max_output_tokens=50, api_keys=("s3cret",)) as server:
        body = {"messages": MESSAGES}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            status, answer = await post(server, "/v1/chat/completions", body, headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for headers in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert (await post(server, "/v1/chat/completions", body, headers))[0] == 200
        headers = {"x-api-key": "s3cret"}
        large = {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert (await post(server, "/v1/chat/completions", large, headers))[0] == 413
        status, answer = await post(server, "/v1/chat/completions", body | {"max_tokens": 51}, headers)
        assert (status, answer["error"]["param"]) == (400, "max_tokens")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__])


@settings(max_examples=300)
@given(body=st.dictionaries(FIELDS, JSON), kind=st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_json_is_a_request_or_a_named_error(body: dict[str, Any], kind: type[Any]) -> None:
    try:
        request = decode_body(json.dumps(body).encode(), kind)
        request.stop_strings()
        if isinstance(request, ChatRequest):
            to_messages(request.messages)
        else:
            request.prompts()
    except ApiError as error:
        assert error.status == 400
