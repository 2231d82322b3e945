"""What a chat template does, found out by rendering small conversations with it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from resin.plan.errors import InvalidRequest
from resin.recipes.call_formats import BARE_JSON, CALL_FORMATS, HARMONY
from resin.recipes.calls import Call, parsed_arguments, read_json_calls
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.tagged import Tags

Render = Callable[[list[dict[str, Any]], list[Any], bool], str]
"""Turns, tools, whether the assistant is to speak next; the text. Raises InvalidRequest."""

_CITY = "Zanzibar"
_TOOL = Tool(
    "probe_weather",
    "Weather",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
)
_ARGUMENTS = {"city": _CITY, "days": 2}
_CALL_ID = "call_0123456789abcdef01234567"
_ANSWER, _RESULT = "Sunny.", "monsoon"
_ASKED = {"role": "user", "content": "Rain?"}
_CHANNEL = "<|channel|>"
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

Content = Literal["missing", "empty", "none"]


@dataclass(frozen=True, slots=True)
class Turns:
    """How a template wants messages spelled.

    Attributes:
        content: of an answer that is only calls: no such key, an empty text, or None.
        dumps_arguments: arguments of calls are JSON text, not an object.
        shortens_ids: ids of calls are nine letters and digits.
        joins_words: words before a call are part of the reasoning, if there is any.
    """

    content: Content = "missing"
    dumps_arguments: bool = False
    shortens_ids: bool = False
    joins_words: bool = False

    def spell(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages as transformers has them; each tool result is a turn of its own."""
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        return [turn for message in messages for turn in self._spell(message, names)]

    def _spell(self, message: Message, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        for result in message.tool_results:
            name = result.name or names.get(result.call_id)
            named = {"name": name} if name else {}
            yield {"role": "tool", "content": result.text, "tool_call_id": self.spell_id(result.call_id), **named}
        if message.tool_results and not message.text:
            return
        role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
        text, thoughts = message.text, message.reasoning
        if self.joins_words and message.tool_calls and thoughts and text:
            text, thoughts = "", f"{thoughts}\n{text}"
        turn: dict[str, Any] = {"role": role.value, "content": text}
        if thoughts:
            turn |= {"reasoning_content": thoughts, "thinking": thoughts}
        if message.tool_calls:
            turn["tool_calls"] = [
                self.spell_call(call.id, call.name, parsed_arguments(call.arguments), call.arguments)
                for call in message.tool_calls
            ]
            if not text:
                self.set_content(turn)
        yield turn

    def spell_call(self, call_id: str, name: str, arguments: Any, dumped: str) -> dict[str, Any]:
        function = {"name": name, "arguments": dumped if self.dumps_arguments else arguments}
        return {"type": "function", "id": self.spell_id(call_id), "function": function}

    def set_content(self, turn: dict[str, Any]) -> None:
        if self.content == "missing":
            turn.pop("content", None)
        else:
            turn["content"] = "" if self.content == "empty" else None

    def spell_id(self, call_id: str) -> str:
        if not self.shortens_ids or re.fullmatch("[A-Za-z0-9]{9}", call_id):
            return call_id
        return blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template does.

    Attributes:
        turns: how it wants messages spelled.
        shows_tools: tools on offer appear in the prompt.
        shows_calls: so do calls of earlier answers.
        writes_calls: they do not, but results do, and the calls can be written into the answer's text.
        shows_results: so do results of tools.
        call_format: how it writes calls: a name of CALL_FORMATS, BARE_JSON, or "" for none of them.
        tags: of reasoning and of calls.
        ends: control tokens that it writes after an answer.
    """

    turns: Turns
    shows_tools: bool
    shows_calls: bool
    writes_calls: bool
    shows_results: bool
    call_format: str
    tags: Tags
    ends: tuple[str, ...]

    def describe(self) -> str:
        """What it does, in a few words."""
        calls = f"calls read as {self.call_format}" if self.call_format else "calls come out as text"
        tools = calls if self.shows_tools or self.call_format else "no tools"
        return tools + (f", reasoning in {self.tags.reasoning[0]}" if self.tags.reasoning else "")


def probe_template(
    render: Render, sources: Sequence[str], controls: Mapping[str, int], pattern: re.Pattern[str]
) -> Traits:
    """Finds out.

    Args:
        render: the template.
        sources: its source, for what no conversation shows.
        controls: control tokens of the vocabulary.
        pattern: matches any of them, as its first group.
    """
    shown = [found for turns in _spellings() if (found := _try_calls(render, turns, pattern)) is not None]
    # A spelling whose calls can be read back is the one that the template was written for.
    turns, call_format, after = next((found for found in shown if found[1]), shown[0] if shown else (Turns(), "", ""))
    call_format = call_format or _mentioned("\n".join(sources), controls)
    tags = CALL_FORMATS.get(call_format, Tags())
    known = [pair for pair in _REASONING if pair[0] in controls or any(tag in text for tag in pair for text in sources)]
    result = {"role": "tool", "content": _RESULT, "name": _TOOL.name, "tool_call_id": turns.spell_id(_CALL_ID)}
    calling, tools = _calling(turns), [_TOOL.to_function()]
    wordy = {**calling, "content": "Wait.", "reasoning_content": "Hm.", "thinking": "Hm."}
    said = calling if shown else {"role": "assistant", "content": _ANSWER}
    shows_results = _RESULT in _attempt(render, [_ASKED, said, result], tools, True)
    inside = {*tags.all(), *tags.inner, *tags.frame}
    return Traits(
        replace(turns, joins_words=bool(shown) and not _attempt(render, [_ASKED, wordy], tools, False)),
        shows_tools=_TOOL.name in _attempt(render, [_ASKED], tools, True),
        shows_calls=bool(shown),
        writes_calls=shows_results and not shown and call_format in CALL_FORMATS,
        shows_results=shows_results,
        call_format=call_format,
        tags=replace(tags, reasoning=known[0] if known else None),
        ends=tuple({token: 0 for token in (_answer_end(render, pattern), after) if token and token not in inside}),
    )


def _spellings() -> Iterator[Turns]:
    contents: tuple[Content, ...] = ("missing", "empty", "none")
    for shortens, dumps, content in itertools.product((False, True), (False, True), contents):
        yield Turns(content, dumps, shortens)


def _calling(turns: Turns) -> dict[str, Any]:
    call = turns.spell_call(_CALL_ID, _TOOL.name, _ARGUMENTS, json.dumps(_ARGUMENTS))
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns.set_content(turn)
    return turn


def _try_calls(render: Render, turns: Turns, pattern: re.Pattern[str]) -> tuple[Turns, str, str] | None:
    """The spelling, the format of a call in it, and the token after it; None if the call does not appear."""
    tools = [_TOOL.to_function()]
    text = _attempt(render, [_ASKED, _calling(turns)], tools, False)
    opened, asked = (_attempt(render, [_ASKED], tools, opens) for opens in (True, False))
    answer = text.removeprefix(opened if text.startswith(opened) else asked)
    if _TOOL.name not in answer or _CITY not in answer or "None" in answer:
        return None
    name = next((name for name, tags in CALL_FORMATS.items() if _reads_back(tags, answer, pattern)), "")
    bare, *rest = pattern.split(answer.lstrip())
    if not name and answer.lstrip().startswith("{") and _is_call(read_json_calls(bare)):
        name = BARE_JSON
    if not name and _CHANNEL in rest:
        name = HARMONY
    return turns, name, rest[-2] if rest and not rest[-1].strip() else ""


def _reads_back(tags: Tags, answer: str, pattern: re.Pattern[str]) -> bool:
    assert tags.tool_call is not None
    opening, closing = tags.tool_call
    _, found, body = answer.partition(opening)
    if closing:
        body, closed, _ = body.partition(closing)
        found = found and closed
    else:
        outer = (piece.start() for piece in pattern.finditer(body) if piece[1] not in tags.inner)
        body = body[: next(outer, len(body))]
    return bool(found) and _is_call(tags.read_calls(body, [_TOOL]))


def _mentioned(source: str, controls: Mapping[str, int]) -> str:
    """The format whose tags a template names without writing a call in them, or else those that the vocabulary has."""
    openings = {name: tags.tool_call[0] for name, tags in CALL_FORMATS.items() if tags.tool_call is not None}
    names = [name for name, tag in openings.items() if tag in source]
    names = names or [name for name, tag in openings.items() if tag in controls]
    if "xml" in names:
        names.remove("json" if "<function=" in source else "xml")
    return names[0] if names else ""


def _is_call(calls: list[Call] | None) -> bool:
    return [(call.name, json.loads(call.arguments)) for call in calls or []] == [(_TOOL.name, _ARGUMENTS)]


def _answer_end(render: Render, pattern: re.Pattern[str]) -> str:
    """The control token that closes an answer in the middle of a conversation."""
    text = _attempt(render, [_ASKED, {"role": "assistant", "content": _ANSWER}, _ASKED], [], True)
    after = text.rpartition(_ANSWER)[2]
    between, *found = pattern.split(after, maxsplit=1)
    return found[0] if found and not between.strip() else ""


def _attempt(render: Render, turns: list[dict[str, Any]], tools: list[Any], add_generation_prompt: bool) -> str:
    try:
        return render(turns, tools, add_generation_prompt)
    except InvalidRequest:
        return ""
