"""The state machine that reads harmony messages: header, body, terminator, next header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from resin.recipes.calls import CallIds, arguments_json
from resin.recipes.characters import CharacterStream
from resin.recipes.deltas import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from resin.recipes.recipe import Tokenizer

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_CHANNELS = ("analysis", "commentary", "final")


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
        self._part = part
        self._header = {"": "", "role": "", "channel": "", "constrain": ""}
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
            self._part = "channel"
        elif name == "constrain":
            deltas = []
            self._part = "constrain"
        else:
            deltas = [] if self._in_body else self._begin_body()
        return deltas

    def _on_text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if not self._in_body:
            self._header[self._part] += text
            return []
        if self._kind == "call":
            self._body.append(text)
            return []
        return [ReasoningDelta(text) if self._kind == "analysis" else TextDelta(text)]

    def _begin_body(self) -> list[Delta]:
        deltas = self._misplaced_text()
        where = f"{self._header['role']} {self._header['channel']}"
        recipient = _RECIPIENT.search(where)
        channel = self._header["channel"].split()
        self._in_body = True
        self._recipient = recipient[1].removeprefix("functions.") if recipient else ""
        if self._recipient:
            self._kind = "call"
        else:
            self._kind = channel[0] if channel else ""
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

    def _misplaced_text(self) -> list[Delta]:
        """Header text that is neither a header nor the beginning of one."""
        header = self._header
        role = _RECIPIENT.sub("", header["role"]).strip()
        channel = _RECIPIENT.sub("", header["channel"]).strip()
        stray = header[""] if header[""].strip() else ""
        if not "assistant".startswith(role):
            stray += header["role"].removeprefix("assistant")
        if not any(name.startswith(channel) for name in _CHANNELS):
            stray += header["channel"]
        return [TextDelta(stray, is_incomplete=True)] if stray else []
