"""Anthropic Messages with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from serve import HttpServer
from tests.serve.conftest import WORDS
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner
from tests.serve.test_structured import SCHEMA, fits

anthropic = pytest.importorskip("anthropic")

TOOL = {"name": "weather", "description": "Weather", "input_schema": {"type": "object"}}


@pytest.fixture
def claude(server: HttpServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def create(client: Any, text: str, **options: Any) -> Any:
    turns = [{"role": "user", "content": text}]
    return client.messages.create(**({"model": "scripted", "max_tokens": 500, "messages": turns} | options))


def test_text(claude: Any) -> None:
    message = create(claude, "[words]", system="Be brief.")
    assert [(block.type, block.text) for block in message.content] == [("text", WORDS)]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.output_tokens == len(WORDS.encode()) + 1
    assert message.usage.input_tokens > 0 and message.usage.cache_read_input_tokens == 0


def test_events_of_thinking_text_and_tool_use(claude: Any) -> None:
    with claude.messages.stream(
        model="scripted",
        max_tokens=500,
        messages=[{"role": "user", "content": "[think and call]"}],
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        events = [event for event in stream if event.type not in ("text", "thinking", "input_json", "signature")]
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [event for event in events if event.type.startswith("content_block")]
    # Blocks follow one another: start, deltas, stop, each under its own index.
    walk = [(event.type.removeprefix("content_block_"), event.index) for event in blocks]
    assert [step for i, step in enumerate(walk) if i == 0 or step != walk[i - 1]] == [
        (kind, index) for index in range(3) for kind in ("start", "delta", "stop")
    ]
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[0].thinking, final.content[1].text) == ("Hm.", "Wait.")
    assert (final.content[2].name, final.content[2].input) == ("weather", {"city": "Bonn"})
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0


def test_tool_results_go_back(claude: Any) -> None:
    first = create(claude, "[call]", tools=[TOOL])
    call = first.content[-1]
    assert (first.stop_reason, call.type) == ("tool_use", "tool_use")
    turns = [
        {"role": "user", "content": "[call]"},
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And now [words]"},
            ],
        },
    ]
    assert create(claude, "", messages=turns, tools=[TOOL]).content[0].text == WORDS


def test_stop_reasons(claude: Any) -> None:
    message = create(claude, "[words]", stop_sequences=["quick", "fox"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "quick")
    assert message.content[0].text == "The "
    message = create(claude, "[words]", max_tokens=3)
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "The")


def test_tool_choice(claude: Any) -> None:
    tool = TOOL | {"input_schema": SCHEMA}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        message = create(claude, "[start a call]", tools=[tool], tool_choice=choice)
        assert message.stop_reason == "tool_use"
        assert fits(message.content[0].input)
    assert create(claude, "x", tools=[tool], tool_choice={"type": "none"}).content[0].text == "Hello!"


def test_an_answer_that_is_begun_goes_on(claude: Any) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So: [words]"}]
    assert create(claude, "", messages=turns).content[0].text == WORDS


COUNTED: list[dict[str, Any]] = [
    {"system": "s", "tools": [TOOL]},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "disabled"}},
    {"tools": [TOOL], "tool_choice": {"type": "none"}},
    {"tools": [TOOL], "tool_choice": {"type": "any"}},
    {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So: "}]},
    {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}]}]},
]


@pytest.mark.parametrize("recipe", ["qwen3", "gpt_oss", "llama3", "lfm2"])
def test_count_tokens_is_what_the_answer_reports(recipe: str) -> None:
    with running_server(ScriptedRunner(), recipe=recipe) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            for options in COUNTED:
                body = {"model": "scripted", "messages": [{"role": "user", "content": "Grüße"}]} | options
                counted = client.messages.count_tokens(**body).input_tokens
                assert counted == client.messages.create(max_tokens=3, **body).usage.input_tokens, options


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_only_warm_the_cache(claude: Any, stream: bool) -> None:
    if stream:
        with claude.messages.stream(
            model="scripted", max_tokens=0, messages=[{"role": "user", "content": "x"}]
        ) as events:
            message = events.get_final_message()
    else:
        message = create(claude, "x", max_tokens=0)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)


def test_structured_output(claude: Any) -> None:
    message = create(claude, "[words]", output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert fits(json.loads(message.content[0].text)) and message.stop_reason == "end_turn"


def test_sampling_fields_that_newer_clients_leave_out(claude: Any) -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    assert create(claude, "x", extra_body=extra).content[0].text == "Hello!"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_errors_have_anthropics_shape(claude: Any, change: dict[str, Any], name: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(claude, "x", extra_body=change)
    body = caught.value.response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(name)
    with pytest.raises(anthropic.NotFoundError):
        create(claude, "x", model="claude-9")


def test_a_late_error_is_an_event() -> None:
    runner = ScriptedRunner(default="abcdefghij" * 300, step_s=0.002)
    with running_server(runner, request_timeout_s=0.2) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                for _ in create(client, "x", stream=True, max_tokens=4000):
                    pass
    assert json.loads(json.dumps(caught.value.body))["error"]["type"] == "timeout_error"
