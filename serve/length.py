"""Whether a text may fit into the context, found out without encoding all of it.

A text of megabytes takes seconds to encode, and its ids take the interpreter while they become Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable

from resin.recipes import Tokenizer

LIKELY_CHARACTERS = 6
"""A token of ordinary text has 3 to 5: what is longer than this for each token is looked at before it is encoded."""

PIECE_CHARACTERS = 1 << 16

CUT_TOKENS = 16
"""How many tokens more a text may have because it was cut: two words beside one another, and room for odd rules."""


def longest_token_bytes(tokenizer: Tokenizer, vocab_size: int) -> int:
    """Bytes of the longest token."""

    def size(token_id: int) -> int:
        try:
            return len(tokenizer.id_to_bytes(token_id))
        except KeyError:  # a padded row of the head
            return 0

    return max(map(size, range(vocab_size)), default=0)


def has_room(texts: Iterable[str], tokenizer: Tokenizer, room_tokens: int, longest_bytes: int) -> bool:
    """False if texts have more than `room_tokens` tokens together for certain; reads no more than it takes to know."""
    texts = list(texts)
    characters = sum(map(len, texts))
    if characters <= room_tokens * LIKELY_CHARACTERS:
        return True
    if characters > room_tokens * longest_bytes:
        return False
    tokens = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            tokens += max(0, len(tokenizer.encode_parts([piece])) - CUT_TOKENS)
            if tokens > room_tokens:
                return False
    return True
