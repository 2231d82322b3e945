"""Whole answers: models, chat, completions, limits, usage, logprobs."""

from __future__ import annotations

import math
from typing import Any

from bench.check_server.answers import Answer, read_chat, read_completion
from bench.check_server.api import COMPLETIONS, Api
from bench.check_server.outcome import Figures, Skipped, require
from bench.check_server.prompts import COUNT, STORY, stop_string_of


async def check_models(api: Api, figures: Figures) -> None:
    """`/v1/models` lists models with an id each."""
    body = (await api.get("/v1/models")).ok()
    ids = [model["id"] for model in body["data"]]
    figures["models"] = len(ids)
    require(body.get("object") == "list", f"object is {body.get('object')!r}, not 'list'")
    require(ids and all(isinstance(name, str) and name for name in ids), f"the ids are {ids}")
    require(len(set(ids)) == len(ids), f"an id comes twice: {ids}")


async def check_chat(api: Api, figures: Figures) -> None:
    """A conversation of several turns is answered."""
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Now name a colour."},
    ]
    body = (await api.post("/v1/chat/completions", api.chat_body("", messages=messages))).ok()
    answer = read_chat(body)
    require(answer.text or answer.reasoning, "the answer is empty")
    require(isinstance(body.get("id"), str) and body["id"], f"id is {body.get('id')!r}")
    require(isinstance(body.get("created"), int), f"created is {body.get('created')!r}")
    require([choice["index"] for choice in body["choices"]] == [0], "there is not exactly one choice")
    figures["answer"] = (answer.text or answer.reasoning)[:60]


async def check_completions(api: Api, figures: Figures) -> None:
    """`/v1/completions` continues a text, whether it comes as one or in a list."""
    prompt = "The capital of France is"
    answer = read_completion((await api.complete(prompt, max_tokens=8)).offered("completions"))
    require(answer.text, "the answer is empty")
    body = api.completion_body(prompt, max_tokens=8) | {"prompt": [prompt, prompt]}
    several = (await api.post(COMPLETIONS, body)).offered("several prompts")
    require(sorted(choice["index"] for choice in several["choices"]) == [0, 1], "two prompts do not give two choices")
    figures["answer"] = answer.text[:60]


async def check_repeatability(api: Api, figures: Figures) -> None:
    """A greedy answer, asked for three times, is the same three times."""
    answers = [read_chat((await api.chat(STORY, max_tokens=48)).ok()) for _ in range(3)]
    figures["answer_characters"] = len(answers[0].text)
    require(len({answer.said for answer in answers}) == 1, f"greedy answers differ: {[a.text[:80] for a in answers]}")


async def check_stop_string(api: Api, figures: Figures) -> None:
    """The answer ends before a stop string that lies across tokens."""
    text, stop = await find_stop(api)
    answer = read_chat((await api.chat(COUNT, max_tokens=48, stop=[stop])).ok())
    figures["stop"] = stop
    judge_stop(answer, text, stop)


async def find_stop(api: Api) -> tuple[str, str]:
    """A greedy answer and a stop string from its middle.

    Raises:
        Skipped: the answer is too short.
    """
    text = read_chat((await api.chat(COUNT, max_tokens=48)).ok()).text
    stop = stop_string_of(text)
    if not stop:
        raise Skipped(f"the answer is too short to stop in: {text!r}")
    return text, stop


def judge_stop(answer: Answer, text: str, stop: str) -> None:
    """Raises Failed unless the answer is the text up to the stop string."""
    expected = text[: text.find(stop)]
    require(answer.text == expected, f"with stop={stop!r} the answer is {answer.text!r}, expected {expected!r}")
    require(answer.finish_reason == "stop", f"finish_reason is {answer.finish_reason!r}, expected 'stop'")


async def check_max_tokens(api: Api, figures: Figures) -> None:
    """`max_tokens` is kept, and the finish reason says so."""
    for limit in (1, 7):
        answer = read_chat((await api.chat(COUNT, max_tokens=limit)).ok())
        used = answer.usage["completion_tokens"] if answer.usage else None
        figures[f"tokens_of_{limit}"] = used
        require(used is None or used <= limit, f"max_tokens={limit} gave {used} tokens")
        if answer.finish_reason != "length" and used is not None and used < limit:
            raise Skipped("the answer ended by itself before the limit")
        require(answer.finish_reason == "length", f"max_tokens={limit} ended with {answer.finish_reason!r}")


async def check_usage(api: Api, figures: Figures) -> None:
    """Token counts add up, repeat, and grow with the prompt."""
    short, again, long = [
        read_chat((await api.chat(text, max_tokens=8)).ok()).usage for text in (COUNT, COUNT, COUNT + STORY * 4)
    ]
    if short is None or again is None or long is None:
        raise Skipped("the server reports no usage")
    for usage in (short, again, long):
        judge_usage(usage, 8)
    figures["prompt_tokens"], figures["long_prompt_tokens"] = short["prompt_tokens"], long["prompt_tokens"]
    require(short["prompt_tokens"] == again["prompt_tokens"], "the same prompt has two lengths")
    require(long["prompt_tokens"] > short["prompt_tokens"], "a longer prompt has no more tokens")


def judge_usage(usage: Any, max_tokens: int) -> None:
    """Raises Failed unless the counts are possible."""
    prompt, completion, total = (usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    require(prompt > 0 and 0 < completion <= max_tokens, f"impossible counts: {usage}")
    require(total == prompt + completion, f"total_tokens is {total}, not {prompt} + {completion}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    require(0 <= cached <= prompt, f"{cached} of {prompt} prompt tokens are said to come from a cache")


async def check_choices(api: Api, figures: Figures) -> None:
    """`n=2` gives two choices."""
    body = (await api.chat(STORY, n=2, temperature=1, max_tokens=8)).offered("n=2")
    indices = sorted(choice["index"] for choice in body["choices"])
    figures["choices"] = len(indices)
    require(indices == [0, 1], f"n=2 gives the choices {indices}")


async def check_logprobs(api: Api, figures: Figures) -> None:
    """Logprobs of a greedy answer: possible, sorted, the chosen token first, and together the answer."""
    body = (await api.chat(COUNT, max_tokens=12, logprobs=True, top_logprobs=3)).offered("logprobs")
    choice = body["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content")
    if not entries:
        raise Skipped("the answer holds no logprobs")
    spelled = b""
    for entry in entries:
        top = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        require(math.isfinite(entry["logprob"]) and entry["logprob"] <= 1e-6, f"a logprob is {entry['logprob']}")
        require(len(top) <= 3 and top == sorted(top, reverse=True), f"top_logprobs are not sorted: {top}")
        # Alternatives within rounding of each other may stand in either order.
        require(not top or abs(top[0] - entry["logprob"]) < 1e-3, "a greedy token is not the most likely one")
        given = entry.get("bytes")
        spelled += bytes(given) if given is not None else entry["token"].encode()
    text = read_chat(body).text
    figures["tokens"], figures["sum"] = len(entries), round(sum(entry["logprob"] for entry in entries), 4)
    if not text.isascii():
        raise Skipped("the answer is not ASCII: tokens need not be whole characters")
    require(text.strip() in spelled.decode(errors="replace"), f"the tokens spell {spelled!r}, the answer is {text!r}")
