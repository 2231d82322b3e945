"""The state machine that reads harmony messages: header, body, terminator, next header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from resin.recipes.calls import CallIds, arguments_json
from resin.recipes.characters import CharacterStream
from resin.recipes.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from resin.recipes.recipe import Tokenizer

_RECIPIENT = re.compile(r"(?:^|\s|(?<=assistant))to=(\S+)")
_ROLE = re.compile(r"\s*(assistant)?\s*")
_CHANNEL = re.compile(r"\s*(analysis|commentary|final)\s*(json|code|text)?\s*")
_CHANNEL_HEADS = [
    f"{channel} {rest}" for channel in ("analysis", "commentary", "final") for rest in ("to=", "json", "code", "text")
]
_NO_TOOLS = ("assistant", "user", "all")


class HarmonyParser:
    """Reads the messages of one response; the header that the prompt opened belongs to it.

    Analysis is reasoning, a message with a recipient is a tool call, everything else is text. What stands where a
    header should be, and is none, becomes text flagged incomplete.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int], prompt_ids: Sequence[int]) -> None:
        """`ids` names the format's tokens without their brackets."""
        self._characters = CharacterStream(tokenizer)
        self._name_of = {token_id: name for name, token_id in ids.items()}
        self._call_ids = CallIds(prompt_ids)
        self._calls = 0
        self._begin_header("")
        starts = [index for index, token_id in enumerate(prompt_ids) if token_id == ids["start"]]
        if starts:
            self.push(prompt_ids[starts[-1] :])

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for token_id in token_ids:
            name = self._name_of.get(token_id)
            if name is None:
                deltas += self._on_text(self._characters.push(token_id))
            else:
                deltas += self._on_text(self._characters.flush())
                deltas += self._on_control(name)
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._on_text(self._characters.flush())
        return deltas + self._close()

    def _begin_header(self, part: str) -> None:
        """`part` is "role" after a start token and "" where one should have come."""
        self._in_body = False
        self._header = [(part, "")]
        self._kind = ""
        self._recipient = ""
        self._body: list[str] = []

    def _on_control(self, name: str) -> list[Delta]:
        if name in ("end", "return", "call", "endoftext"):
            deltas = self._close()
            self._begin_header("")
        elif name == "start":
            deltas = self._close()
            self._begin_header("role")
        elif name == "channel":
            deltas = self._close() if self._in_body else []
            if self._in_body:
                self._begin_header("role")
            self._header.append(("channel", ""))
        elif name == "constrain":
            deltas = []
            self._header.append(("constrain", ""))
        else:
            deltas = [] if self._in_body else self._begin_body()
        return deltas

    def _on_text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if not self._in_body:
            part, begun = self._header[-1]
            self._header[-1] = (part, begun + text)
            return []
        if self._kind == "call":
            self._body.append(text)
            return []
        return [ReasoningDelta(text) if self._kind == "analysis" else TextDelta(text)]

    def _begin_body(self) -> list[Delta]:
        deltas = self._misplaced_text(is_whole=True)
        recipients = [match[1] for _, text in self._header for match in _find_recipient(text)]
        channels = [match[1] for part, text in self._header if part == "channel" and (match := _match_channel(text))]
        self._in_body = True
        self._recipient = recipients[0].removeprefix("functions.") if recipients else ""
        self._kind = "call" if self._recipient else channels[-1] if channels else ""
        return deltas

    def _close(self) -> list[Delta]:
        """Ends the message at hand. A call counts once its arguments are whole, whatever the terminator."""
        if not self._in_body:
            return self._misplaced_text()
        body = "".join(self._body)
        self._body.clear()
        if self._kind != "call":
            return []
        arguments = arguments_json(body)
        if arguments is None:
            return [TextDelta(body, is_incomplete=True)] if body else []
        self._calls += 1
        index = self._calls - 1
        return [ToolCallDelta(index, self._call_ids.id_of(index), self._recipient, arguments)]

    def _misplaced_text(self, *, is_whole: bool = False) -> list[Delta]:
        """Header text that is neither a header nor, unless it is to be whole, the beginning of one."""
        stray = ""
        for part, text in self._header:
            rest = _RECIPIENT.sub("", text)
            if part == "channel":
                fits = not rest.strip() or _match_channel(text) or (not is_whole and _begins(rest, _CHANNEL_HEADS))
                stray += "" if fits else text
            elif part != "constrain" and not _ROLE.fullmatch(rest):
                fits = part == "role" and not is_whole and _begins(rest, ["assistant to="])
                stray += "" if fits else text.removeprefix("assistant") if part == "role" else text
        return [TextDelta(stray, is_incomplete=True)] if stray else []


def _begins(text: str, heads: Iterable[str]) -> bool:
    begun = " ".join(text.split())
    return any(head.startswith(begun) for head in heads)


def _find_recipient(text: str) -> list[re.Match[str]]:
    return [match for match in _RECIPIENT.finditer(text) if match[1] not in _NO_TOOLS]


def _match_channel(text: str) -> re.Match[str] | None:
    """A channel's name, perhaps with the kind of content that follows, which may also lack its control token."""
    return _CHANNEL.fullmatch(_RECIPIENT.sub(" ", text))
