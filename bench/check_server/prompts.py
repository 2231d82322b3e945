"""Texts to ask with."""

from __future__ import annotations

import random
import secrets

COUNT = "Count from one to thirty in words, separated by commas."
STORY = "Write two sentences about a lighthouse keeper and his dog."
UNICODE = "Repeat this exactly: Größe, naïve, Привет, 東京, 안녕, 😀🎉👍🏽"
EMOJI = "😀 🎉 東京 😀 🎉 東京 😀 🎉 東京 😀"

_WORDS = (
    "river stone window garden letter winter yellow market silver bridge forest candle engine mirror "
    "summer basket harbour copper needle pocket thunder velvet orange castle meadow lantern feather copper"
).split()


def unique_text(words: int) -> str:
    """That many plain words, drawn anew each time: no server can have seen more than the first few before."""
    rng = random.Random(secrets.token_bytes(16))
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def short_questions(count: int) -> list[str]:
    """Different small questions, whose answers differ too."""
    return [
        f"Write one sentence about the number {10 + index} and a {_WORDS[index % len(_WORDS)]}."
        for index in range(count)
    ]


def stop_string_of(text: str) -> str:
    """A few letters from the middle of a text, across two words if there are two; "" if the text is too short."""
    if len(text) < 6:
        return ""
    middle = len(text) // 3
    gap = text.find(" ", max(2, middle))
    if 0 < gap < len(text) - 2:
        return text[gap - 2 : gap + 3]
    return text[middle : middle + 3]
