"""Many clients at once, clients that leave, and the server's state afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np

from bench.check_server.answers import read_chat, read_chat_stream
from bench.check_server.api import CHAT, Api
from bench.check_server.outcome import Figures, Skipped, require
from bench.check_server.prompts import short_questions

MAX_TOKENS = 24
EQUAL_SHARE = 0.5
"""Rounding differs with the size of a batch, and may turn a greedy answer; answers to other clients' questions would
leave nearly none equal."""


async def check_burst(api: Api, figures: Figures, concurrency: int) -> None:
    """Different questions at once: every stream ends properly, and answers belong to their questions."""
    questions = short_questions(concurrency)
    sample = questions[: min(8, concurrency)]
    alone = {question: read_chat((await api.chat(question, max_tokens=MAX_TOKENS)).ok()).text for question in sample}
    started = time.perf_counter()
    answers = await asyncio.gather(*(_ask(api, question) for question in questions))
    figures["seconds"] = round(time.perf_counter() - started, 3)
    done = {question: answer for question, answer in zip(questions, answers, strict=True) if answer is not None}
    figures["completed"], figures["told_to_wait"] = len(done), len(answers) - len(done)
    require(done, "every client was told to wait")
    figures["tokens_per_s"] = round(sum(tokens for _, _, tokens in done.values()) / figures["seconds"], 1)
    firsts = [first_s * 1e3 for _, first_s, _ in done.values()]
    figures["first_ms_p50"], figures["first_ms_p99"] = (round(float(np.percentile(firsts, q)), 1) for q in (50, 99))
    equal = [done[question][0] == text for question, text in alone.items() if question in done]
    figures["same_as_alone"] = f"{sum(equal)} of {len(equal)}"
    require(sum(equal) >= EQUAL_SHARE * len(equal), "answers under load differ from those given alone")


async def _ask(api: Api, question: str) -> tuple[str, float, int] | None:
    """Text, seconds to the first token and tokens; None if the server asked to come back later."""
    body = api.chat_body(question, max_tokens=MAX_TOKENS, stream_options={"include_usage": True})
    stream = await api.stream(CHAT, body)
    if stream.status in (429, 503):
        return None
    answer = read_chat_stream(stream)
    return answer.text, answer.first_s, (answer.usage or {}).get("completion_tokens") or len(answer.pieces)


async def check_disconnects(api: Api, figures: Figures, concurrency: int) -> None:
    """Clients leave in the middle of long streams; then the server answers as quickly and as well as before."""
    question = short_questions(1)[0]
    before, before_s = await _timed(api, question)
    await asyncio.gather(*(_leave(api, number) for number in range(2 * concurrency)))
    after, after_s = await _timed(api, question)
    figures |= {
        "left": 2 * concurrency,
        "before_ms": round(before_s * 1e3, 1),
        "after_ms": round(after_s * 1e3, 1),
    }
    require(before == after, f"the answer was {before!r}, and is {after!r} after clients have left")
    # Abandoned streams that go on would hold the server for many times the answer's own length.
    require(
        after_s < 10 * before_s + 2, f"an answer took {before_s:.2f} s, and {after_s:.2f} s after clients have left"
    )


async def _timed(api: Api, question: str) -> tuple[str, float]:
    started = time.perf_counter()
    text = read_chat((await api.chat(question, max_tokens=MAX_TOKENS)).ok()).text
    return text, time.perf_counter() - started


async def _leave(api: Api, number: int) -> None:
    body: dict[str, Any] = api.chat_body("Count from one to one thousand in words.", max_tokens=1000, stream=True)
    async with api.session.post(
        api.url + CHAT, data=json.dumps(body), headers={"Content-Type": "application/json"}
    ) as r:
        require(r.status < 500, f"status {r.status}")
        if number % 2:
            await r.content.readany()
        r.close()


async def check_health(api: Api, figures: Figures) -> None:
    """`/health` says that all is well after all this."""
    reply = await api.get("/health")
    figures["status"] = reply.status
    if reply.status == 404:
        raise Skipped("the server has no /health")
    require(reply.status == 200, f"status {reply.status}")
