"""Streamed answers: the same as whole ones, in order, and cut at whole characters."""

from __future__ import annotations

from typing import Any

from bench.check_server.answers import Answer, read_chat, read_chat_stream, read_completion, read_completion_stream
from bench.check_server.api import CHAT, COMPLETIONS, Api, Stream
from bench.check_server.correctness import find_stop, judge_stop, judge_usage
from bench.check_server.outcome import Figures, Skipped, require
from bench.check_server.prompts import COUNT, EMOJI, STORY, UNICODE

REPLACEMENT = "\ufffd"


async def check_stream_equals_whole(api: Api, figures: Figures) -> None:
    """A streamed greedy chat answer is the whole one in pieces."""
    whole = read_chat((await api.chat(STORY, max_tokens=48)).ok())
    streamed = read_chat_stream(await api.stream(CHAT, api.chat_body(STORY, max_tokens=48)))
    figures["pieces"] = len(streamed.pieces)
    _same(streamed, whole)


async def check_completion_stream(api: Api, figures: Figures) -> None:
    """The same for `/v1/completions`."""
    prompt = "The lighthouse keeper went down to the harbour and"
    whole = read_completion((await api.complete(prompt)).offered("completions"))
    streamed = read_completion_stream(await api.stream(COMPLETIONS, api.completion_body(prompt)))
    figures["pieces"] = len(streamed.pieces)
    _same(streamed, whole)


def _same(streamed: Answer, whole: Answer) -> None:
    require(
        streamed.said == whole.said,
        f"streamed {streamed.text!r} ({streamed.finish_reason}), whole {whole.text!r} ({whole.finish_reason})",
    )


async def check_stream_form(api: Api, figures: Figures) -> None:
    """Chunks of one answer: one id, the role first, one finish reason and nothing after it, one [DONE]."""
    stream = (await api.stream(CHAT, api.chat_body(COUNT))).ok()
    require(stream.content_type.startswith("text/event-stream"), f"Content-Type is {stream.content_type!r}")
    require(stream.after_done == 0, f"{stream.after_done} events follow [DONE]")
    events = [event for _, event in stream.events]
    require({event.get("object") for event in events} == {"chat.completion.chunk"}, "an object is no chunk")
    require(len({event["id"] for event in events}) == 1, "the chunks have several ids")
    choices = [choice for event in events for choice in event.get("choices") or []]
    require(choices and choices[0]["delta"].get("role") == "assistant", "the first chunk does not give the role")
    finishes = [place for place, choice in enumerate(choices) if choice.get("finish_reason")]
    require(len(finishes) == 1, f"{len(finishes)} chunks have a finish_reason")
    later = [choice for choice in choices[finishes[0] + 1 :] if choice["delta"].get("content")]
    require(not later, "text follows the finish_reason")
    figures["chunks"] = len(events)


async def check_stream_is_gradual(api: Api, figures: Figures) -> None:
    """The text comes in several pieces while it is made, not in one at the end."""
    stream = await api.stream(CHAT, api.chat_body(COUNT, stream_options={"include_usage": True}))
    answer = read_chat_stream(stream)
    tokens = (answer.usage or {}).get("completion_tokens", 0)
    figures |= {"pieces": len(answer.pieces), "tokens": tokens}
    if len(answer.text + answer.reasoning) < 16:
        raise Skipped(f"the answer is too short: {answer.text!r}")
    figures |= {"first_ms": round(answer.first_s * 1e3, 1), "last_ms": round(answer.pieces[-1][0] * 1e3, 1)}
    require(len(answer.pieces) > 1, "the whole text came in one piece")


async def check_stream_usage(api: Api, figures: Figures) -> None:
    """`stream_options.include_usage`: the counts of the whole answer, after the last choice."""
    whole = read_chat((await api.chat(COUNT)).ok())
    stream = await api.stream(CHAT, api.chat_body(COUNT, stream_options={"include_usage": True}))
    events = [event for _, event in stream.offered("stream_options").events]
    with_usage = [event for event in events if event.get("usage")]
    if not with_usage:
        raise Skipped("no chunk has usage")
    usage: dict[str, Any] = with_usage[-1]["usage"]
    figures["completion_tokens"] = usage["completion_tokens"]
    judge_usage(usage, 32)
    require(with_usage[-1] is events[-1], "chunks follow the one with usage")
    names = ("prompt_tokens", "completion_tokens")
    if whole.usage is not None:
        counts = [(whole.usage[name], usage[name]) for name in names]
        require(all(one == other for one, other in counts), f"whole and streamed usage differ: {counts}")


async def check_characters(api: Api, figures: Figures) -> None:
    """No chunk holds half a character: in a chat, or in a raw text that goes on in emoji if the chat stays ASCII."""
    streamed = read_chat_stream(await api.stream(CHAT, api.chat_body(UNICODE, max_tokens=64)))
    if not streamed.text.isascii():
        _judge_characters(streamed, read_chat((await api.chat(UNICODE, max_tokens=64)).ok()), figures)
        return
    stream = await api.stream(COMPLETIONS, api.completion_body(EMOJI, max_tokens=64))
    whole = read_completion((await api.complete(EMOJI, max_tokens=64)).offered("completions"))
    _judge_characters(read_completion_stream(stream.offered("completions")), whole, figures)


def _judge_characters(streamed: Answer, whole: Answer, figures: Figures) -> None:
    figures["letters_beyond_ascii"] = sum(not letter.isascii() for letter in streamed.text)
    if streamed.text.isascii():
        raise Skipped("the model wrote nothing beyond ASCII")
    # max_tokens may cut the very last character.
    pieces = [text for _, text in streamed.pieces]
    whole_pieces = pieces[:-1] if streamed.finish_reason == "length" else pieces
    require(not any(REPLACEMENT in text for text in whole_pieces), f"a chunk holds U+FFFD: {streamed.text!r}")
    require(
        streamed.text.rstrip(REPLACEMENT) == whole.text.rstrip(REPLACEMENT),
        f"streamed {streamed.text!r}, whole {whole.text!r}",
    )


async def check_streamed_stop(api: Api, figures: Figures) -> None:
    """A stream ends before the stop string, and no chunk shows the string's beginning."""
    text, stop = await find_stop(api)
    stream: Stream = await api.stream(CHAT, api.chat_body(COUNT, max_tokens=48, stop=[stop]))
    figures["stop"] = stop
    judge_stop(read_chat_stream(stream), text, stop)
