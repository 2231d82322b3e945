"""The parser of formats that mark reasoning and tool calls with opening and closing tags."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from resin.recipes.calls import Call, CallIds, ends_within_value, read_json_calls
from resin.recipes.characters import CharacterStream
from resin.recipes.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from resin.recipes.messages import Tool
from resin.recipes.recipe import Tokenizer
from resin.recipes.script import atomic_id


@dataclass(frozen=True, slots=True)
class Tags:
    """A format's tags: (opening, closing) pairs, None where it has none.

    Attributes:
        reasoning: around what the model thinks.
        tool_call: around a call; one that has no closing tag ("") ends with the answer or where the next begins.
        read_calls: what stands between them, as calls; None for what is none.
        inner: control tokens that are part of the text of a call.
        frame: tags around all calls, which say nothing.
    """

    reasoning: tuple[str, str] | None = None
    tool_call: tuple[str, str] | None = None
    read_calls: Callable[[str, Sequence[Tool]], list[Call] | None] = lambda text, tools: read_json_calls(text)
    inner: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()

    def all(self) -> tuple[str, ...]:
        return (*(self.reasoning or ()), *(self.tool_call or ()))


class _State(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


def possible_start_length(text: str, words: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of one of the words."""
    longest = max((len(word) for word in words), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(word.startswith(end) for word in words):
            return length
    return 0


class TagSplitter:
    """Cuts text at literal tags, holding back what may become one."""

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tags
        self._first_characters = frozenset(tag[0] for tag in tags)
        self._held = ""

    def push(self, text: str) -> Iterator[tuple[str, bool]]:
        """Pieces in order, with True for a tag."""
        if not self._held and self._first_characters.isdisjoint(text):
            yield text, False
            return
        self._held += text
        while found := min(((at, tag) for tag in self._tags if (at := self._held.find(tag)) >= 0), default=None):
            at, tag = found
            if at:
                yield self._held[:at], False
            yield tag, True
            self._held = self._held[at + len(tag) :]
        keep = possible_start_length(self._held, self._tags)
        if ready := self._held[: len(self._held) - keep]:
            yield ready, False
        self._held = self._held[len(self._held) - keep :]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class TaggedParser:
    """Text, reasoning and tool calls by tags.

    A tag that is one token is recognised by its id alone, so the same characters spelled by ordinary tokens stay
    text; any other tag is recognised in the text. White space between tags belongs to the format: what follows
    reasoning or surrounds tool calls is dropped, what stands between words is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tags: Tags,
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        starts_in_reasoning: bool = False,
    ) -> None:
        self._tags = tags
        self._tools = tools
        known = [tag for tag in (*tags.all(), *tags.frame) if tag]
        self._has_tags = bool(known)
        self._characters = CharacterStream(tokenizer)
        self._tag_of = {atom: tag for tag in (*known, *tags.inner) if (atom := atomic_id(tokenizer, tag)) is not None}
        self._splitter = TagSplitter([tag for tag in known if tag not in self._tag_of.values()])
        self._state = _State.REASONING if starts_in_reasoning else _State.TEXT
        self._call_ids = CallIds(prompt_ids)
        self._calls = 0
        self._body: list[str] = []
        self._space = ""  # white space whose fate the next piece decides
        self._drops_space = starts_in_reasoning  # until words come, space is part of the format
        self._follows_call = False

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        if not self._has_tags:
            return [TextDelta(text) for text in map(self._characters.push, token_ids) if text]
        deltas: list[Delta] = []
        for token_id in token_ids:
            tag = self._tag_of.get(token_id)
            if tag is None:
                deltas += self._read(self._characters.push(token_id))
            else:
                deltas += self._end_text()
                deltas += self._on_tag(tag)
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._end_text()
        if self._state is _State.CALL:
            deltas += self._end_call()
        elif self._space and not self._follows_call:
            deltas.append(self._delta(self._space))
        self._space = ""
        return deltas

    def _end_text(self) -> list[Delta]:
        """Ends a broken character and gives up on a tag that did not come."""
        deltas = self._read(self._characters.flush())
        if held := self._splitter.flush():
            deltas += self._on_text(held)
        return deltas

    def _read(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if text:
            for piece, is_tag in self._splitter.push(text):
                deltas += self._on_tag(piece, piece) if is_tag else self._on_text(piece)
        return deltas

    def _delta(self, text: str) -> Delta:
        return ReasoningDelta(text) if self._state is _State.REASONING else TextDelta(text)

    def _on_text(self, text: str) -> list[Delta]:
        if self._state is _State.CALL:
            self._body.append(text)
            return []
        text = self._space + text
        if self._drops_space:
            text = text.lstrip(_SPACE)
        words = text.rstrip(_SPACE)
        self._space = text[len(words) :]
        if not words:
            return []
        self._drops_space = self._follows_call = False
        return [self._delta(words)]

    def _on_tag(self, tag: str, spelled: str = "") -> list[Delta]:
        """`spelled` is the tag's text where it stood in the text: inside a call it may be part of an argument."""
        opens_reasoning, closes_reasoning = self._tags.reasoning or ("", "")
        opens_call, closes_call = self._tags.tool_call or ("", "")
        if self._state is _State.CALL:
            if spelled and ends_within_value("".join(self._body)):
                self._body.append(spelled)
                return []
            if tag == closes_call or tag in self._tags.frame:
                return self._end_call()
            if tag == opens_call:
                deltas = self._end_call()
                self._state = _State.CALL
                return deltas
            self._body.append(tag if tag in self._tags.inner else spelled)
        elif tag == opens_call:
            self._enter(_State.CALL)
        elif tag == opens_reasoning:
            self._enter(_State.REASONING)
        elif tag == closes_reasoning:
            self._enter(_State.TEXT)
        return []

    def _enter(self, state: _State) -> None:
        self._state = state
        self._space = ""
        self._drops_space = True
        self._follows_call = False

    def _end_call(self) -> list[Delta]:
        """A call counts once its body is whole, even if the closing tag never came."""
        body = "".join(self._body)
        self._body.clear()
        self._enter(_State.TEXT)
        calls = self._tags.read_calls(body, self._tools)
        if calls is None:
            self._drops_space = False
            return [TextDelta(body, is_incomplete=True)] if body else []
        self._drops_space = False
        self._follows_call = True
        first = self._calls
        self._calls += len(calls)
        return [
            ToolCallDelta(index, self._call_ids.id_of(index), call.name, call.arguments)
            for index, call in enumerate(calls, first)
        ]


_SPACE = " \t\r\n"
_TAIL_TOKENS = 16  # a generation prompt opens reasoning at its very end; a tag spelled out takes three to eight tokens


def opens_reasoning(tokenizer: Tokenizer, tags: Tags, prompt_ids: Sequence[int]) -> bool:
    """True if the prompt ends in an opening reasoning tag, white space aside."""
    if tags.reasoning is None:
        return False
    opening_id = atomic_id(tokenizer, tags.reasoning[0])
    text = ""
    for token_id in prompt_ids[-_TAIL_TOKENS:]:
        if token_id == opening_id:
            text = tags.reasoning[0]
        elif token_id in tokenizer.special_ids:
            text = ""
        else:
            text += tokenizer.id_to_bytes(token_id).decode(errors="replace")
    return text.rstrip(_SPACE).endswith(tags.reasoning[0])
