"""What a conversation is made of: roles, typed blocks, messages and tools."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Role(enum.StrEnum):
    """Who says a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Text:
    """Words that somebody said."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the assistant thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made.

    Attributes:
        id: names the call within its conversation; results refer to it.
        name: the tool's name.
        arguments: JSON text, normally of an object.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered to the call `call_id`; `name` is the tool's, "" if unknown."""

    call_id: str
    text: str
    name: str = ""


Block = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: a role and its blocks, in order."""

    role: Role
    blocks: tuple[Block, ...]

    def __init__(self, role: Role, blocks: Iterable[Block]) -> None:
        object.__setattr__(self, "role", Role(role))
        object.__setattr__(self, "blocks", tuple(blocks))

    @property
    def text(self) -> str:
        """All Text blocks joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def reasoning(self) -> str:
        """All Reasoning blocks joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, Reasoning))

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [block for block in self.blocks if isinstance(block, ToolCall)]

    @property
    def tool_results(self) -> list[ToolResult]:
        return [block for block in self.blocks if isinstance(block, ToolResult)]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the assistant may call; `parameters` is a JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def to_function(self) -> dict[str, Any]:
        """The definition in the shape that most models were trained on (`{"type": "function", ...}`)."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


def separate_results(messages: Iterable[Message]) -> list[Message]:
    """The same conversation with tool results in TOOL messages of their own, neighbouring ones merged."""
    turns: list[Message] = []
    for message in messages:
        results = message.tool_results
        if results:
            if turns and turns[-1].role is Role.TOOL:
                results = [*turns.pop().tool_results, *results]
            turns.append(Message(Role.TOOL, results))
        others = [block for block in message.blocks if not isinstance(block, ToolResult)]
        if others or not results:
            turns.append(Message(Role.USER if message.role is Role.TOOL else message.role, others))
    return turns
