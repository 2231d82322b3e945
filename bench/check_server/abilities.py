"""Structured output, tool calls and reasoning."""

from __future__ import annotations

import json
from typing import Any

from bench.check_server.answers import Answer, Call, read_chat, read_chat_stream
from bench.check_server.api import CHAT, Api
from bench.check_server.outcome import Failed, Figures, require

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
WEATHER = "What is the weather in Paris in celsius? Use the tool."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["fruit", "animal"]}, "is_alive": {"type": "boolean"}},
    "required": ["kind", "is_alive"],
    "additionalProperties": False,
}
SUM = "What is 17 + 25? Think first, then answer with the number."
THINKING_TOKENS = 1024


async def check_schema(api: Api, figures: Figures) -> None:
    """`response_format: json_schema` gives JSON that fits the schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    reply = await api.chat("Describe a dog.", max_tokens=128, response_format=wanted)
    text = read_chat(reply.offered("response_format")).text
    figures["answer"] = text[:80]
    value = _object(text, "the answer")
    require(set(value) == {"kind", "is_alive"}, f"the fields are {sorted(value)}")
    require(value["kind"] in ("fruit", "animal") and isinstance(value["is_alive"], bool), f"the values are {value}")


async def check_tool_call(api: Api, figures: Figures) -> None:
    """A required call has a name from the list, arguments that fit, and an id."""
    call = _only_call(read_chat((await _ask_tool(api)).ok()))
    figures["arguments"] = call.arguments[:80]
    _judge_call(call)


async def check_streamed_tool_call(api: Api, figures: Figures) -> None:
    """The same in a stream."""
    body = api.chat_body(WEATHER, max_tokens=256, tools=[TOOL], tool_choice="required")
    call = _only_call(read_chat_stream(await api.stream(CHAT, body)))
    figures["arguments"] = call.arguments[:80]
    _judge_call(call)


async def check_tool_result(api: Api, figures: Figures) -> None:
    """The result of a call is taken, and answered in text."""
    call = _only_call(read_chat((await _ask_tool(api)).ok()))
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": WEATHER},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "clear"}'},
    ]
    answer = read_chat((await api.chat("", messages=messages, max_tokens=64, tools=[TOOL], tool_choice="none")).ok())
    figures["answer"] = answer.text[:80]
    require(answer.text or answer.reasoning, "the answer is empty")
    require(not answer.calls, "tool_choice='none' gives a call")


async def check_reasoning(api: Api, figures: Figures) -> None:
    """Reasoning stands apart from the answer, whole and streamed, and no tag of it shows."""
    whole = read_chat((await api.chat(SUM, max_tokens=THINKING_TOKENS)).ok())
    figures |= {"reasoning_characters": len(whole.reasoning), "answer": whole.text[:60]}
    require(whole.reasoning, "the answer has no reasoning_content")
    require("<think>" not in whole.text and "</think>" not in whole.text, f"a tag shows: {whole.text!r}")
    streamed = read_chat_stream(await api.stream(CHAT, api.chat_body(SUM, max_tokens=THINKING_TOKENS)))
    require(streamed.said == whole.said, "streamed and whole reasoning or answer differ")


async def _ask_tool(api: Api) -> Any:
    return await api.chat(WEATHER, max_tokens=256, tools=[TOOL], tool_choice="required")


def _only_call(answer: Answer) -> Call:
    require(len(answer.calls) == 1, f"{len(answer.calls)} calls instead of one; text {answer.text[:80]!r}")
    require(answer.finish_reason in ("tool_calls", "stop"), f"finish_reason is {answer.finish_reason!r}")
    return answer.calls[0]


def _judge_call(call: Call) -> None:
    require(call.id, "the call has no id")
    require(call.name == "get_weather", f"the call is for {call.name!r}")
    arguments = _object(call.arguments, "the arguments")
    require(set(arguments) == {"city", "unit"}, f"the arguments are {arguments}")
    require(isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit"), f"{arguments}")


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise Failed(f"{what}: no JSON: {text[:100]!r}") from None
    require(isinstance(value, dict), f"{what}: no object: {text[:100]!r}")
    return dict(value)
