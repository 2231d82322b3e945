"""A prompt in the making: control tokens and plain text, kept apart until they are ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from resin.plan.errors import InvalidRequest
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.recipe import Tokenizer


class Script:
    """Collects a prompt, which the tokenizer then encodes as one whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._parts: list[str | int] = []

    def control(self, token_id: int) -> Script:
        """Appends a control token."""
        self._parts.append(token_id)
        return self

    def text(self, *texts: str) -> Script:
        """Appends plain text, which stays text even if it spells a control token."""
        self._parts += texts
        return self

    def ids(self) -> list[int]:
        """The prompt so far."""
        return self._tokenizer.encode_parts(self._parts)


def atomic_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of a control token, which no text becomes; None if the vocabulary has none of that spelling."""
    return tokenizer.controls.get(token)


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


def parse_date(text: str) -> date:
    """An ISO date, or today's for "".

    Raises:
        InvalidRequest: something else.
    """
    try:
        return date.fromisoformat(text) if text else date.today()
    except (TypeError, ValueError):
        raise InvalidRequest("current_date", text, "a date such as 2026-01-31") from None
