"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from resin.recipes import Delta, ReasoningDelta, TextDelta, Tokenizer, ToolCallDelta
from serve.errors import ApiError, invalid, openai_body
from serve.generation import Ending, Update
from serve.logprobs import chat_logprobs
from serve.planning import Ask, plan_answer, reasoning_options, tool_use_of
from serve.replies import json_answer, read_body, usage_of
from serve.schemas.chat import ChatRequest, to_messages
from serve.service import Service, service_of
from serve.session import Choice, Session
from serve.sse import EventStream, EventTemplate, encode_events
from serve.text_rows import ScoredText, TokenLogprob

FINISH_REASONS = {
    Ending.STOP: "stop",
    Ending.STOP_STRING: "stop",
    Ending.LENGTH: "length",
    Ending.TOOL_CALLS: "tool_calls",
}


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, streaming or not."""
    service = service_of(request)
    body = await read_body(request, ChatRequest)
    service.check_model(body.model)
    plans = await plan_answer(request, ask_of, body)
    reply = _Reply(service, body)
    with service.run(request, plans, cache_salt=body.cache_salt or "") as session:
        if body.stream:
            return await _stream(request, session, reply)
        return await json_answer(request, session, lambda updates: reply.whole(session, updates))


def ask_of(body: ChatRequest) -> Ask:
    """The request in no API's own words.

    Raises:
        ApiError: content that is not text, alternatives without logprobs, or a response format without its schema.
    """
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", f"top_logprobs={body.top_logprobs}: needs logprobs: true")
    has_new_name = body.max_completion_tokens is not None
    return Ask(
        messages=to_messages(body.messages),
        sampling=body,
        max_tokens=body.max_completion_tokens if has_new_name else body.max_tokens,
        names={"max_output_tokens": "max_completion_tokens" if has_new_name else "max_tokens"},
        use=tool_use_of(body),
        schema=body.schema(),
        options=reasoning_options(body.reasoning_effort, body.chat_template_kwargs),
        stops=body.stop_strings(),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


class _Reply:
    """What all chunks of one answer share."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = service.model
        self.tokenizer: Tokenizer | None = service.tokenizer if body.logprobs else None
        options = body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.usage_goes_on = bool(options and options.continuous_usage_stats)
        self._started: set[int] = set()  # choices that have been heard of
        self._templates: dict[tuple[int, type[Delta]], EventTemplate] = {}  # of events with nothing but text

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = self.head("chat.completion.chunk") | {"choices": choices}
        if self.includes_usage or self.usage_goes_on:
            chunk["usage"] = usage
        return chunk

    def encode(self, choice: Choice, update: Update, usage: dict[str, Any] | None) -> bytes:
        """An update as the bytes of its events."""
        index = choice.index
        is_first = index not in self._started
        if len(update.deltas) == 1 and not (is_first or usage or update.ending):
            (delta,) = update.deltas
            if not isinstance(delta, ToolCallDelta | ScoredText):
                template = self._templates.get((index, type(delta))) or self._add_template(index, type(delta))
                return template.fill(delta.text)
        self._started.add(index)
        return encode_events(self.chunks_of(index, update, usage, is_first=is_first))

    def _add_template(self, index: int, kind: type[TextDelta | ReasoningDelta]) -> EventTemplate:
        template = EventTemplate(lambda text: self.chunk([_choice_fields(index, _delta_fields(kind(text)))]))
        self._templates[index, kind] = template
        return template

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self.tokenizer is None else chat_logprobs(entries, self.tokenizer)

    def chunks_of(
        self, index: int, update: Update, usage: dict[str, Any] | None, *, is_first: bool
    ) -> list[dict[str, Any]]:
        """An update as chunks: one a delta, and one for the ending."""
        choices = [_choice_fields(index, {"role": "assistant", "content": ""})] if is_first else []
        for delta in update.deltas:
            choices.append(_choice_fields(index, _delta_fields(delta)))
            if isinstance(delta, ScoredText):
                choices[-1]["logprobs"] = self.logprobs(delta.logprobs)
        if update.ending is not None:
            finish = FINISH_REASONS[update.ending]
            choices.append(_choice_fields(index, {}) | {"finish_reason": finish})
        return [self.chunk([choice], usage) for choice in choices]

    def whole(self, session: Session, updates: Sequence[Update]) -> dict[str, Any]:
        """The whole answer at once."""
        choices = []
        for index, update in enumerate(updates):
            assert update.ending is not None
            choices.append(
                {
                    "index": index,
                    "message": message_of(update.deltas),
                    "logprobs": self.logprobs(update.text_logprobs),
                    "finish_reason": FINISH_REASONS[update.ending],
                }
            )
        return self.head("chat.completion") | {"choices": choices, "usage": usage_of(session)}


def _choice_fields(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_fields(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}


def message_of(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The assistant's message that a choice amounts to."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls = [
        {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": delta.arguments}}
        for delta in deltas
        if not isinstance(delta, TextDelta | ReasoningDelta)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


async def _stream(request: web.Request, session: Session, reply: _Reply) -> web.StreamResponse:
    stream = EventStream(request, session)
    try:
        await stream.forward(
            lambda choice, update: reply.encode(choice, update, usage_of(session) if reply.usage_goes_on else None)
        )
        if reply.includes_usage:
            await stream.send(encode_events([reply.chunk([], usage_of(session))]))
    except ApiError as error:
        if not stream.has_started:
            raise
        await stream.send(encode_events([openai_body(error)]))
    return await stream.close(b"data: [DONE]\n\n")
