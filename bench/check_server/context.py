"""Long prompts: time to the first token by size, and what a repeated prefix saves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.check_server.answers import Answer, read_chat_stream
from bench.check_server.api import CHAT, Api, Stream
from bench.check_server.outcome import Figures, Skipped, require
from bench.check_server.prompts import unique_text

ROUNDS = 3
PREFIX_WORDS = 400
QUESTION = " Name one of these words."
SLOWER_FACTOR, SLOWER_S = 1.5, 0.1
"""A reused prefix may cost this much more than a new one before it counts as a fault: clocks and neighbours vary."""


async def ask(api: Api, text: str) -> Answer:
    """A streamed answer of a few tokens, with usage where the server gives it."""
    return read_chat_stream(await _stream(api, text))


async def _stream(api: Api, text: str) -> Stream:
    return await api.stream(CHAT, api.chat_body(text, max_tokens=8, stream_options={"include_usage": True}))


def cached_tokens(usage: Any) -> int | None:
    """Prompt tokens that came from a cache; None where the server does not say."""
    details = (usage or {}).get("prompt_tokens_details") or {}
    count: int | None = details.get("cached_tokens")
    return count


async def check_prefix_reuse(api: Api, figures: Figures) -> None:
    """The second request with the same long beginning finds it in the cache, and only the second."""
    cold, warm = await _cold_and_warm(api)
    prompt = (cold.usage or {}).get("prompt_tokens")
    found = [cached_tokens(answer.usage) for answer in (cold, warm)]
    figures |= {"prompt_tokens": prompt, "cached_tokens_cold": found[0], "cached_tokens_warm": found[1]}
    if prompt is None or found[0] is None or found[1] is None:
        raise Skipped("usage does not tell cached tokens")
    require(found[0] < prompt / 2, f"{found[0]} of {prompt} tokens of a new prompt are said to be cached")
    require(found[1] <= prompt, f"{found[1]} of {prompt} tokens are said to be cached")
    if found[1] == 0:
        raise Skipped("nothing was reused: the server's prefix cache is off, or the prompt too short for it")
    require(found[1] > found[0], f"a repeated prompt reuses {found[1]} tokens, a new one {found[0]}")


async def check_prefix_answer(api: Api, figures: Figures) -> None:
    """Reused prefixes do not change greedy answers, but for what rounding may turn in one or the other."""
    pairs = [await _cold_and_warm(api) for _ in range(ROUNDS)]
    same = sum(cold.said == warm.said for cold, warm in pairs)
    figures["same"] = f"{same} of {ROUNDS}"
    require(same, f"all differ: {[(cold.text, warm.text) for cold, warm in pairs]}")


async def _cold_and_warm(api: Api) -> tuple[Answer, Answer]:
    text = unique_text(PREFIX_WORDS) + QUESTION
    return await ask(api, text), await ask(api, text)


async def check_prefix_time(api: Api, figures: Figures) -> None:
    """Time to the first token of a new prompt and of the same again: reuse must not make it slower."""
    pairs = [await _cold_and_warm(api) for _ in range(ROUNDS)]
    cold_s, warm_s = (statistics.median(pair[place].first_s for pair in pairs) for place in (0, 1))
    figures |= {"cold_ms": round(cold_s * 1e3, 1), "warm_ms": round(warm_s * 1e3, 1)}
    figures["cold_over_warm"] = round(cold_s / warm_s, 2)
    slowest = cold_s * SLOWER_FACTOR + SLOWER_S
    require(warm_s <= slowest, f"{warm_s:.3f} s for a repeated prompt, {cold_s:.3f} s for a new one")


async def check_first_token_times(api: Api, figures: Figures, sizes: Sequence[int]) -> None:
    """Median time to the first token for new prompts of that many words, until one does not fit."""
    for words in sizes:
        times, tokens = [], None
        for _ in range(ROUNDS):
            stream = await _stream(api, unique_text(words) + QUESTION)
            if stream.status in (400, 413, 422) and figures:
                figures[f"{words}_words"] = f"refused with {stream.status}"
                return
            answer = read_chat_stream(stream)
            times.append(answer.first_s)
            tokens = (answer.usage or {}).get("prompt_tokens", tokens)
        figures[f"{words}_words"] = {"prompt_tokens": tokens, "first_ms": round(statistics.median(times) * 1e3, 1)}
