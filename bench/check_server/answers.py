"""Answers of both endpoints, whole or streamed, in one shape that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.check_server.api import Stream
from bench.check_server.outcome import require

FINISH_REASONS = ("stop", "length", "tool_calls", "function_call", "content_filter")


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """What a choice says.

    Attributes:
        pieces: arrival in seconds and text (or reasoning) of each streamed piece that is not empty.
        ended_s: arrival of a stream's last event.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None
    pieces: list[tuple[float, str]] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def first_s(self) -> float:
        """Seconds to the first piece, or to the end of an answer without text."""
        return self.pieces[0][0] if self.pieces else self.ended_s

    @property
    def said(self) -> tuple[str, str, str | None]:
        """What a repetition must have in common."""
        return self.reasoning, self.text, self.finish_reason


def read_chat(body: Mapping[str, Any]) -> Answer:
    """The first choice of a chat completion.

    Raises:
        Failed: the body is not one.
    """
    require(body.get("object") == "chat.completion", f"object is {body.get('object')!r}, not 'chat.completion'")
    choice = body["choices"][0]
    message = choice["message"]
    require(message.get("role") == "assistant", f"the message's role is {message.get('role')!r}")
    calls = [
        Call(call.get("id", ""), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    text, reasoning = message.get("content") or "", _reasoning(message)
    return _checked(Answer(text, reasoning, choice["finish_reason"], calls, body.get("usage")))


def read_completion(body: Mapping[str, Any]) -> Answer:
    """The first choice of a text completion.

    Raises:
        Failed: the body is not one.
    """
    require(body.get("object") == "text_completion", f"object is {body.get('object')!r}, not 'text_completion'")
    choice = body["choices"][0]
    return _checked(Answer(choice["text"], "", choice["finish_reason"], usage=body.get("usage")))


def read_chat_stream(stream: Stream) -> Answer:
    """The first choice of a streamed chat completion.

    Raises:
        Failed: an error in it, or no proper end.
    """
    answer = Answer()
    for at_s, choice in _first_choices(stream, answer):
        delta = choice["delta"]
        text, reasoning = delta.get("content") or "", _reasoning(delta)
        answer.text += text
        answer.reasoning += reasoning
        for part in delta.get("tool_calls") or []:
            _add_call(answer.calls, part)
        if text or reasoning:
            answer.pieces.append((at_s, text or reasoning))
    return _checked(answer)


def read_completion_stream(stream: Stream) -> Answer:
    """The first choice of a streamed text completion.

    Raises:
        Failed: an error in it, or no proper end.
    """
    answer = Answer()
    for at_s, choice in _first_choices(stream, answer):
        answer.text += choice["text"]
        if choice["text"]:
            answer.pieces.append((at_s, choice["text"]))
    return _checked(answer)


def _first_choices(stream: Stream, answer: Answer) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Each piece of the first choice with its arrival; usage, finish reason and end go into the answer."""
    for at_s, event in stream.ok().events:
        answer.usage, answer.ended_s = event.get("usage") or answer.usage, at_s
        for choice in event.get("choices") or []:
            if choice["index"] == 0:
                yield at_s, choice
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def _reasoning(message: Mapping[str, Any]) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""


def _add_call(calls: list[Call], part: Mapping[str, Any]) -> None:
    while len(calls) <= part["index"]:
        calls.append(Call())
    call, function = calls[part["index"]], part.get("function") or {}
    call.id = part.get("id") or call.id
    call.name += function.get("name") or ""
    call.arguments += function.get("arguments") or ""


def _checked(answer: Answer) -> Answer:
    require(isinstance(answer.text, str), f"the text is a {type(answer.text).__name__}")
    require(answer.finish_reason in FINISH_REASONS, f"finish_reason is {answer.finish_reason!r}")
    return answer
