"""Responses with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from resin.recipes import Message, Role, Text
from serve import HttpServer
from serve.response_store import ResponseStore
from tests.serve.conftest import CALL, WORDS
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner
from tests.serve.test_fields import post
from tests.serve.test_structured import SCHEMA, fits

CALL_BODY = TOKENIZER.encode(CALL)
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def events_of(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(client.responses.create(model="scripted", stream=True, **options))


def test_text(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="[words]", instructions="Be brief.")
    assert response.output_text == WORDS
    assert response.status == "completed" and response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.output_tokens == len(WORDS.encode()) + 1
    assert response.usage.input_tokens_details.cached_tokens == 0


def test_streamed_events_are_complete_and_in_order(client: openai.OpenAI) -> None:
    events = events_of(client, input="[think]")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [kind for kind in kinds if kind.endswith(".delta")]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert deltas
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Forty-two." == events[-1].response.output_text
    reasoning, message = events[-1].response.output
    assert reasoning.content[0].text == "Let me see."
    for item, index in ((reasoning, 0), (message, 1)):
        ids = {
            event.item_id
            for event in events
            if getattr(event, "output_index", None) == index and hasattr(event, "item_id")
        }
        assert ids == {item.id}
    assert events[-1].response.usage.output_tokens_details.reasoning_tokens > 0
    assert events[0].response.output == [] and events[0].response.status == "in_progress"


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="[call]", tools=[TOOL]) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["message", "function_call"]


def test_calls_and_their_outputs(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="[calls]", tools=[TOOL])
    calls: Any = response.output
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "weather", '{"city": "Bonn"}')
    ] * 2
    assert calls[0].call_id != calls[1].call_id
    items: Any = [{"role": "user", "content": "[calls]"}, *[call.model_dump() for call in calls]]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny [words]"} for call in calls]
    assert client.responses.create(model="scripted", input=items).output_text == WORDS


def test_call_events(client: openai.OpenAI) -> None:
    events = events_of(client, input="[calls]", tools=[TOOL])
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Bonn"}'] * 2
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.name, item.arguments) for item in added] == [("weather", "")] * 2


def test_previous_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input="My key is [words].")
    second = client.responses.create(model="scripted", input="Again", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.output_text == WORDS  # the key came with the earlier turn
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == WORDS
    client.responses.delete(first.id)
    for call in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.create(model="scripted", input="x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_stream_can_be_built_upon_and_store_false_cannot(client: openai.OpenAI) -> None:
    response = events_of(client, input="[words]")[-1].response
    assert client.responses.create(model="scripted", input="x", previous_response_id=response.id).output_text == WORDS
    response = client.responses.create(model="scripted", input="[words]", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("prompt", "tokens", "statuses"),
    [
        ("[words]", 4, {"message": "incomplete"}),
        ("[words]", 500, {"message": "completed"}),
        ("[think]", 5, {"reasoning": "incomplete"}),
        ("[think]", 20, {"reasoning": "completed", "message": "incomplete"}),
        ("[call]", 500, {"message": "completed", "function_call": "completed"}),
        ("[calls]", len(CALL_BODY) + 2, {"function_call": "completed"}),
        ("[calls]", len(CALL_BODY) + 9, {"function_call": "completed", "message": "incomplete"}),
    ],
)
def test_statuses_tell_the_same_everywhere(
    client: openai.OpenAI, prompt: str, tokens: int, statuses: dict[str, str]
) -> None:
    options: Any = {"input": prompt, "max_output_tokens": tokens, "tools": [TOOL]}
    whole = client.responses.create(model="scripted", **options)
    assert {item.type: item.status for item in whole.output} == statuses  # type: ignore[union-attr]
    events = events_of(client, **options)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert {item.type: item.status for item in done} == statuses
    assert [item.model_dump() for item in done] == [item.model_dump() for item in events[-1].response.output]
    is_cut = whole.incomplete_details is not None
    assert (whole.status, events[-1].type) == (
        ("incomplete", "response.incomplete") if is_cut else ("completed", "response.completed")
    )


async def test_an_error_leaves_the_open_item_incomplete() -> None:
    runner = ScriptedRunner(default="abcdefghij" * 300, step_s=0.002)
    with running_server(runner, request_timeout_s=0.2) as server:
        _, events = await post(server, "/v1/responses", {"input": "x", "stream": True})
    last = json.loads(events.strip().splitlines()[-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_length_leaves_it_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="scripted", input="[words]", max_output_tokens=4)
    assert (response.status, response.output_text) == ("incomplete", "The ")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert events_of(client, input="[words]", max_output_tokens=4)[-1].type == "response.incomplete"


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"input": "[words]", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response: Any = client.responses.create(model="scripted", **options)
    logprobs = response.output[0].content[0].logprobs
    assert bytes(byte for entry in logprobs for byte in entry.bytes).decode() == WORDS
    streamed = [
        entry
        for event in events_of(client, **options)
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs]


def test_structured_output_and_tool_choice(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}
    response = client.responses.create(model="scripted", input="[words]", text=text)
    assert fits(json.loads(response.output_text))
    tool: Any = TOOL | {"parameters": SCHEMA}
    chosen: Any = client.responses.create(
        model="scripted", input="[start a call]", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    assert fits(json.loads(chosen.output[0].arguments))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_the_field_is_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**({"model": "scripted", "input": "x", "extra_body": change}))
    assert caught.value.param == param


def test_a_failure_ends_the_stream_with_its_event() -> None:
    runner = ScriptedRunner(default="abcdefghij" * 300, step_s=0.002)
    with running_server(runner, request_timeout_s=0.2) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            events = events_of(client, input="x")
    assert events[-1].type == "response.failed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_store_is_bounded() -> None:
    store = ResponseStore(3, 1_000)
    turns = [Message(Role.USER, [Text("x")])]
    for number in range(5):
        store.put({"id": f"r{number}"}, turns)
    assert [store.get(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    store.put({"id": "large", "text": "y" * 900}, turns)
    assert len(store) == 1 and store.get("large") is not None
    store.put({"id": "too large", "text": "y" * 2_000}, turns)
    assert len(store) == 0 and store.total_bytes == 0


def test_store_limits_come_from_the_config(server: HttpServer) -> None:
    assert server.config.stored_responses == 1024
