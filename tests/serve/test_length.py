"""Long texts: what cannot fit is refused after no more than it takes to know."""

from __future__ import annotations

import pytest

from serve.length import LIKELY_CHARACTERS, PIECE_CHARACTERS, has_room, longest_token_bytes
from tests.recipes.byte_tokenizer import ByteTokenizer


class Counting(ByteTokenizer):
    """Ten characters a token; remembers how much it has read."""

    read = 0

    def encode_parts(self, parts: object) -> list[int]:
        (text,) = parts  # type: ignore[misc]
        self.read += len(text)
        return [0] * -(-len(text) // 10)


ROOM = 100_000


@pytest.mark.parametrize(
    ("characters", "fits", "most_read"),
    [
        (ROOM * LIKELY_CHARACTERS, True, 0),  # will be encoded anyway
        (ROOM * 9, True, ROOM * 9),
        (ROOM * 10, True, ROOM * 10),
        (ROOM * 11, False, ROOM * 10 + 2 * PIECE_CHARACTERS),
        (ROOM * 20, False, ROOM * 10 + 2 * PIECE_CHARACTERS),
        (ROOM * 20 + 1, False, 0),  # no token is so long
    ],
)
@pytest.mark.parametrize("texts", [1, 7])
def test_no_more_is_read_than_it_takes(characters: int, fits: bool, most_read: int, texts: int) -> None:
    tokenizer = Counting()
    size = characters // texts
    given = [*["x" * size] * (texts - 1), "x" * (characters - size * (texts - 1))]
    assert has_room(given, tokenizer, ROOM, 20) == fits
    assert tokenizer.read <= most_read


def test_what_fits_is_never_refused() -> None:
    """Cutting may make more tokens of a text, but the doubt is the text's."""
    tokenizer = ByteTokenizer()
    for characters in (1, 10, 1000, PIECE_CHARACTERS + 1, 3 * PIECE_CHARACTERS):
        assert has_room(["x" * characters], tokenizer, characters, 20)
        assert has_room(["x"] * characters, tokenizer, characters, 20)


def test_the_longest_token_is_found_beside_ids_that_are_none() -> None:
    tokenizer = ByteTokenizer()
    longest = max(map(len, tokenizer.controls))
    assert longest_token_bytes(tokenizer, tokenizer.vocab_size + 50) == longest
    assert longest_token_bytes(tokenizer, 256) == 1
