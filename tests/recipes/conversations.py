"""Conversations that recipes are compared on, in the shape of OpenAI's API and as messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from resin.recipes import Block, Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from resin.recipes.template_traits import Turns


@dataclass(frozen=True)
class Conversation:
    """Attributes:
    turns: (role, content) pairs; a call is ("call", [(name, arguments), ...]), a result ("tool", text).
    options: what `render` and `apply_chat_template` both understand.
    """

    name: str
    turns: list[tuple[str, Any]]
    tools: list[Tool] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    is_answered: bool = False

    @property
    def uses_calls(self) -> bool:
        return bool(self.tools) or any(role in ("call", "tool") for role, _ in self.turns)

    @property
    def has_reasoning(self) -> bool:
        return any(role == "thinking" for role, _ in self.turns)


def tool(name: str, description: str, /, required: list[str] | None = None, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required or []}
    return Tool(name, description, schema)


WEATHER = tool(
    "get_weather",
    "Weather of a city, now or in some days.",
    ["city"],
    city={"type": "string", "description": "Name of the city"},
    days={"type": "integer", "description": "How far ahead", "default": 0},
)
SEARCH = tool(
    "search",
    "Searches notes.\nNewest first.",
    ["query"],
    query={"type": "string"},
    tags={"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
    limit={"type": ["integer", "null"]},
    filters={
        "type": "object",
        "properties": {"author": {"type": "string", "description": "Who"}, "since": {"type": "number"}},
        "required": ["author"],
    },
)
CLOCK = Tool("clock", "", {"type": "object", "properties": {}})
CALL = ("call", [("get_weather", {"city": "Köln", "days": 2})])
TWO_CALLS = ("call", [("get_weather", {"city": "Bonn"}), ("search", {"query": 'a "b" <c>', "tags": ["a", "b"]})])
CODE = "def f(x):\n\treturn [x] * 3  # ok\n\n\nprint(f(1))"


def all_conversations() -> list[Conversation]:
    """Thirty and more: plain ones, white space and letters of all kinds, tools, results, reasoning, options."""
    return [*_plain(), *_with_tools(), *_with_reasoning()]


def _plain() -> Iterator[Conversation]:
    texts = {
        "short": "Hi",
        "question": "What is the capital of France?",
        "outer spaces": "  two spaces  and more   ",
        "line ends": "\n\nfirst\r\nsecond\n\n\n",
        "code": CODE,
        "letters": "Übung macht den Meister: naïve café, 東京 🗼, Привет, שלום, ¼ Ⅳ e\u0301",
        "numbers": "1234567 3.14159 1,000,000 0x1F -42 ٣٤",
        "marks": "<b>bold</b> [link](x) {a: 1} 'it's' \"q\" | <| |> </ [/ ]",
        "tabs": "\ta\t\tb \t c",
        "long": "The quick brown fox jumps over the lazy dog. " * 20,
        "run of spaces": "a" + " " * 37 + "b",
        "one space": " ",
        "families": "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
        "JSON": '{"a": [1, 2.5, null], "b": {"c": "d\\ne"}}',
        "formula": r"\int_0^1 x^2\,dx = \frac{1}{3} \Rightarrow $E=mc^2$",
        "address": "See https://example.org/a?b=c&d=%20e#f, or mail to a.b@example.org!",
        "table": "| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted\n\n- [ ] open\n- [x] done",
        "shouting": "HELLO WORLD!!! it's DON'T can't I'LL We'Re camelCase snake_case kebab-case",
        "Arabic": "مرحبا بالعالم، كيف حالك؟",
        "Hindi and Thai": "नमस्ते दुनिया สวัสดีชาวโลก",
        "Chinese": "你好世界。今天天气怎么样",
        "only line ends": "\n\n",
        "no-break": "a\u00a0b\u2003c\u200bd\ufeffe",
    }
    for name, text in texts.items():
        yield Conversation(name, [("user", text)])
    yield Conversation("system", [("system", "Be brief."), ("user", "Hi")])
    yield Conversation("system with space", [("system", " Be brief.\n\nAlways. \n"), ("user", "Hi\n")])
    yield Conversation("long system", [("system", CODE), ("user", "Explain.")])
    turns = [("user", "Hi"), ("assistant", "Hello! How can I help?"), ("user", "Tell me a joke.")]
    yield Conversation("three turns", turns)
    yield Conversation("three turns and system", [("system", "Be funny."), *turns])
    yield Conversation("turns with space", [("user", " a "), ("assistant", " b\n\n"), ("user", "\nc ")])
    many = [turn for index in range(6) for turn in (("user", f"Number {index}?"), ("assistant", f"It is {index * 7}."))]
    yield Conversation("many turns", [*many, ("user", "And now?")])
    yield Conversation("answered", turns[:2], is_answered=True)
    yield Conversation("answered after system", [("system", "Be brief."), *turns[:2]], is_answered=True)


def _with_tools() -> Iterator[Conversation]:
    asked = ("user", "How is the weather in Köln?")
    yield Conversation("tool", [asked], [WEATHER])
    yield Conversation("tools and system", [("system", "Be brief."), asked], [WEATHER, SEARCH, CLOCK])
    loop = [asked, CALL, ("tool", "sunny, 21 °C")]
    yield Conversation("result", loop, [WEATHER])
    yield Conversation("result in JSON", [asked, CALL, ("tool", '{"sky": "clear", "t": [1, 2]}')], [WEATHER])
    yield Conversation("result and system", [("system", "Be brief."), *loop], [WEATHER, SEARCH])
    yield Conversation("result and answer", [*loop, ("assistant", "It is sunny."), ("user", "Thanks!")], [WEATHER])
    yield Conversation("answered result", [*loop, ("assistant", "It is sunny.")], [WEATHER], is_answered=True)
    yield Conversation("result without tools", loop)
    yield Conversation("two calls without tools", [asked, TWO_CALLS, ("tool", "wet"), ("tool", "none"), asked])
    yield Conversation("two loops", [*loop, CALL, ("tool", "rain")], [WEATHER])
    yield Conversation("two calls", [asked, TWO_CALLS, ("tool", "wet"), ("tool", "none found")], [WEATHER, SEARCH])
    yield Conversation("call after words", [asked, ("words", "Let me see."), CALL, ("tool", "wet")], [WEATHER])
    yield Conversation("no arguments", [("user", "Time?"), ("call", [("clock", {})]), ("tool", "12:00")], [CLOCK])
    yield Conversation("later tools", [("user", "Hi"), ("assistant", "Hello"), asked], [WEATHER])


def _with_reasoning() -> Iterator[Conversation]:
    thought = [("user", "2+2?"), ("thinking", "Add them."), ("assistant", "4"), ("user", "And 3+3?")]
    yield Conversation("earlier reasoning", thought)
    yield Conversation(
        "reasoning in a loop", [("user", "Rain?"), ("thinking", "Look."), CALL, ("tool", "no")], [WEATHER]
    )
    yield Conversation("answered with reasoning", thought[:3], is_answered=True)
    yield Conversation("no thinking", [("user", "Hi")], options={"enable_thinking": False})
    yield Conversation("thinking", [("system", "Be brief."), ("user", "Hi")], options={"enable_thinking": True})


def as_messages(conversation: Conversation) -> list[Message]:
    """The turns as messages: words, reasoning and calls of one answer in one message."""
    messages: list[Message] = []
    held: list[Block] = []
    calls: list[str] = []
    for role, content in conversation.turns:
        if role == "thinking":
            held.append(Reasoning(content))
        elif role == "words":
            held.append(Text(content))
        elif role == "call":
            made = [
                ToolCall(f"call{len(messages):02}{i:03}", name, json.dumps(arguments, ensure_ascii=False))
                for i, (name, arguments) in enumerate(content)
            ]
            calls = [call.id for call in made]
            messages.append(Message(Role.ASSISTANT, [*held, *made]))
            held = []
        elif role == "tool":
            messages.append(Message(Role.TOOL, [ToolResult(calls.pop(0), content)]))
        else:
            messages.append(Message(Role(role), [*held, Text(content)]))
            held = []
    return messages


def as_dicts(conversation: Conversation, turns: Turns) -> list[dict[str, Any]]:
    """The same as a client sends it who knows how the template wants messages spelled."""
    dicts: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in as_messages(conversation):
        for result in message.tool_results:
            result_id = {"tool_call_id": result.call_id, "name": names[result.call_id]}
            dicts.append({"role": "tool", "content": result.text, **result_id})
        if message.tool_results:
            continue
        entry: dict[str, Any] = {"role": message.role.value, "content": message.text}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if turns.dumps_arguments else json.loads(call.arguments),
                    },
                }
                for call in message.tool_calls
            ]
            names |= {call.id: call.name for call in message.tool_calls}
            if not message.text:
                entry["content"] = None if turns.content == "none" else ""
            if not message.text and turns.content == "missing":
                del entry["content"]
        dicts.append(entry)
    return dicts
