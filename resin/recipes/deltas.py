"""What a parser makes of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer. `is_incomplete` marks the raw body of a tool call or header that could not be understood."""

    text: str
    is_incomplete: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One whole tool call.

    Attributes:
        index: 0 for the response's first call.
        id: the same for the same prompt and index, different otherwise.
        name: the tool's name.
        arguments: JSON text of an object.
    """

    index: int
    id: str
    name: str
    arguments: str


Delta = TextDelta | ReasoningDelta | ToolCallDelta
