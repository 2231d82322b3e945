"""Conversations on which a native recipe must agree with the chat template that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from resin.plan.errors import InvalidRequest
from resin.recipes.messages import Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from resin.recipes.recipe import Recipe

_DATE = "2019-03-04"  # one that no template has as its default


@dataclass(frozen=True, slots=True)
class Probe:
    """One conversation; `options` are those of `Recipe.render`."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    options: dict[str, Any] = field(default_factory=dict)


def _user(text: str) -> Message:
    return Message(Role.USER, [Text(text)])


def _said(text: str) -> Message:
    return Message(Role.ASSISTANT, [Text(text)])


_SYSTEM = Message(Role.SYSTEM, [Text("Be brief.")])
_CALL = ToolCall("call00001", "weather", '{"city": "Köln", "days": 2}')
_RESULT = Message(Role.TOOL, [ToolResult("call00001", 'sunny, "21 °C"', "weather")])
_TOOLS = (
    Tool(
        "weather",
        "Weather of a city.",
        {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    ),
    Tool("clock", "Time.", {"type": "object", "properties": {}}),
)
_ASKED = _user("Rain?")
_CALLED = Message(Role.ASSISTANT, [_CALL])
_CHAT = (_user("Hi"), _said("Hello!"), _user("And you?"))
_THOUGHT = Message(Role.ASSISTANT, [Reasoning("Add them."), Text("4")])

PROBES = (
    Probe("a question", _CHAT[:1]),
    Probe("a system message", (_SYSTEM, *_CHAT[:1])),
    Probe("several turns", _CHAT),
    Probe("several turns after a system message", (_SYSTEM, *_CHAT)),
    Probe("space around texts", (Message(Role.SYSTEM, [Text(" a\n")]), _user(" b\n\n"), _said("\nc "), _user("d "))),
    Probe("no generation prompt", _CHAT[:2], options={"add_generation_prompt": False}),
    Probe("thinking switched off", _CHAT[:1], options={"enable_thinking": False}),
    Probe("earlier reasoning", (_user("2+2?"), _THOUGHT, _user("3+3?"))),
    Probe("tools", (_ASKED,), _TOOLS),
    Probe("tools after a system message", (_SYSTEM, _ASKED), _TOOLS),
    Probe("a result", (_ASKED, _CALLED, _RESULT), _TOOLS),
    Probe("a result after reasoning", (_ASKED, Message(Role.ASSISTANT, [Reasoning("Look."), _CALL]), _RESULT), _TOOLS),
    Probe("a result and an answer", (_SYSTEM, _ASKED, _CALLED, _RESULT, _said("No."), _user("Thanks!")), _TOOLS),
)


def find_difference(native: Recipe, template: Recipe) -> str:
    """The name of the first probe that the two render to different ids, or "".

    What the template refuses proves nothing; what only the native recipe refuses is a difference.
    """
    for probe in PROBES:
        options = {"current_date": _DATE, **probe.options}
        try:
            expected = template.render(probe.messages, probe.tools, **options)
        except InvalidRequest:
            continue
        try:
            found = native.render(probe.messages, probe.tools, **options)
        except InvalidRequest:
            return probe.name
        if found != expected:
            return probe.name
    return ""
