"""A prompt in the making: control tokens and plain text, kept apart until they are ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from resin.plan.errors import InvalidRequest
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.recipe import Tokenizer


class PlainText:
    """Encodes text so that none of it becomes a control token.

    Where the text spells one, it is cut after the first character and both sides are encoded on their own: the model
    reads the same characters as ordinary tokens.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Iterable[str] = ()) -> None:
        """`controls` adds tokens that the format relies on although the tokenizer does not call them special."""
        self._encode = tokenizer.encode
        special = {tokenizer.id_to_token(token_id) or "" for token_id in tokenizer.special_ids}
        longest_first = sorted(filter(_is_spelled, special | set(controls)), key=lambda text: (-len(text), text))
        alternatives = "|".join(re.escape(text) for text in longest_first)
        self.control_pattern = re.compile(f"({alternatives})") if alternatives else None
        self._overlapping = re.compile(f"(?={alternatives})") if alternatives else None

    def control_starts(self, text: str) -> list[int]:
        """Every index at which a control token is spelled, overlapping ones included."""
        return [match.start() for match in self._overlapping.finditer(text)] if self._overlapping else []

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none of them a control token."""
        ids: list[int] = []
        begin = 0
        for start in self.control_starts(text):
            ids += self._encode(text[begin : start + 1])
            begin = start + 1
        if begin < len(text):
            ids += self._encode(text[begin:])
        return ids


def _is_spelled(token: str) -> bool:
    return len(token) > 1  # one character cannot be cut; no vocabulary has such a control token


class Script:
    """Collects a prompt. Neighbouring texts are encoded together, as a template's output would be."""

    def __init__(self, plain: PlainText) -> None:
        self._plain = plain
        self._ids: list[int] = []
        self._pending: list[str] = []

    def control(self, token_id: int) -> Script:
        """Appends a control token."""
        self._flush()
        self._ids.append(token_id)
        return self

    def text(self, *texts: str) -> Script:
        """Appends plain text."""
        self._pending += texts
        return self

    def ids(self) -> list[int]:
        """The prompt so far."""
        self._flush()
        return list(self._ids)

    def _flush(self) -> None:
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            if text:
                self._ids += self._plain.encode(text)


def atomic_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of a token that `encode` recognises wherever its text stands; None if the vocabulary has none."""
    token_id = tokenizer.token_to_id(token)
    return token_id if token_id is not None and tokenizer.encode(token) == [token_id] else None


def require_tokens(tokenizer: Tokenizer, recipe: str, tokens: Sequence[str]) -> list[int]:
    """Ids of tokens that a format cannot do without.

    Raises:
        InvalidRequest: the vocabulary lacks one.
    """
    ids = [tokenizer.token_to_id(token) for token in tokens]
    missing = [token for token, token_id in zip(tokens, ids, strict=True) if token_id is None]
    if missing:
        raise InvalidRequest("recipe", recipe, f"a tokenizer with the tokens {', '.join(missing)}")
    return [token_id for token_id in ids if token_id is not None]


def stop_ids(tokenizer: Tokenizer, *tokens: str) -> tuple[int, ...]:
    """Ids of the tokens that the vocabulary has, then the tokenizer's own end tokens, each once."""
    found = [token_id for token_id in map(tokenizer.token_to_id, tokens) if token_id is not None]
    return tuple(dict.fromkeys([*found, *tokenizer.eos_ids]))


def reject_tools(recipe: str, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest for tools, calls or results in a format that has no words for them."""
    if tools:
        raise InvalidRequest("tools", [tool.name for tool in tools], f"none: the {recipe} format has no tools")
    for index, message in enumerate(messages):
        if message.tool_calls or message.tool_results or message.role is Role.TOOL:
            raise InvalidRequest(f"messages[{index}]", message.role.value, f"text: the {recipe} format has no tools")
