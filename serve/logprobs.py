"""Logprobs in the shapes of the two OpenAI APIs.

Each token's alternatives are JSON as soon as they are read: as objects, those of a long answer would keep the garbage
collector, and with it every stream, busy for a second.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from resin.recipes import Tokenizer
from serve.text_rows import TokenLogprob, token_bytes

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity."""


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """`choices[].logprobs` of Chat Completions."""
    content = []
    for entry in entries:
        item = _chat_token(entry.token_id, entry.logprob, tokenizer)
        item["top_logprobs"] = [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
        content.append(_written(item))
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Iterable[Iterable[tuple[int, float]] | None],
    tokenizer: Tokenizer,
    *,
    first_offset: int = 0,
) -> dict[str, Any]:
    """`choices[].logprobs` of Completions; `first_offset` is where the first token stands in the text."""
    tokens = [token_text(token_id, tokenizer) for token_id in token_ids]
    # Tokens that share a character have that character's offset.
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offsets = []
    offset = first_offset
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(characters.decode(token_bytes(tokenizer, token_id)))
    return {
        "tokens": tokens,
        "token_logprobs": [None if value is None else max(value, LOWEST_LOGPROB) for value in logprobs],
        "top_logprobs": [
            None
            if top is None
            else _written({token_text(token_id, tokenizer): max(value, LOWEST_LOGPROB) for token_id, value in top})
            for top in tops
        ],
        "text_offset": offsets,
    }


def _written(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as text; one that is not whole characters by its bytes (`bytes:\\xe2\\x82`), as OpenAI writes it."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = token_bytes(tokenizer, token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}
