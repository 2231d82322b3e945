"""The protocols: a Recipe renders conversations and creates Parsers; both work on a Tokenizer's ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from resin.recipes.deltas import Delta
from resin.recipes.messages import Message, Tool


class Tokenizer(Protocol):
    """What recipes need of a tokenizer; `resin.recipes.tokenizer.ChatTokenizer` is one."""

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]
    """Ids that structure a conversation and are never part of its text."""
    controls: Mapping[str, int]
    """Ids by spelling of the tokens that no text may become: the special ones, and those that only a format writes."""
    chat_template: str | None
    tool_template: str | None
    """Replaces `chat_template` where tools are on offer; None if that one does both."""
    named_tokens: Mapping[str, str]
    """Spellings by the names that templates know them under, such as `bos_token`."""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of a text, in which the spelling of a control token becomes that token."""
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of a text with tokens at given places, encoded as a whole: no `str` becomes a control token."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; raises KeyError outside the vocabulary."""
        ...


class Parser(Protocol):
    """Turns one response's tokens into deltas.

    Any ids in any order are fine: nothing raises, no byte of text is lost, and however the tokens are split into
    calls, the deltas are the same. A delta never ends within a character and never shows a special token.
    """

    def push(self, token_ids: Iterable[int]) -> list[Delta]: ...

    def finish(self) -> list[Delta]:
        """What was held back; call once, after the last token."""
        ...


@runtime_checkable
class Recipe(Protocol):
    """One conversation format. Text of messages stays text, even if it spells a special token."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        **options: Any,
    ) -> list[int]:
        """Token ids of the conversation.

        Args:
            messages: the turns so far.
            tools: functions on offer.
            add_generation_prompt: end with the opening of the assistant's turn.
            answer_start: words of the answer that are given, after that opening.
            options: what the format knows (`enable_thinking`, `reasoning_effort`, `current_date` as an ISO date, ...);
                the rest is ignored.

        Raises:
            InvalidRequest: the format has no way to say this; its field is "messages" or "tools".
        """
        ...

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        """A parser for the response to a rendered prompt (which may have opened a reasoning block)."""
        ...
