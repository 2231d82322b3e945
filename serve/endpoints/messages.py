"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from resin.recipes import Delta, ReasoningDelta, TextDelta, ToolCallDelta
from serve.errors import ApiError, anthropic_body
from serve.generation import Ending, Update
from serve.planning import Ask, ToolUse, plan_answer, reasoning_options, render_prompt, texts_of
from serve.replies import json_response, read_body
from serve.schemas.messages import CountRequest, MessagesRequest, OutputConfig, to_messages, to_tools
from serve.schemas.sampling import SamplingFields
from serve.service import Service, length_of, service_of
from serve.session import Session
from serve.sse import EventStream, encode_named

_STOP_REASONS = {
    Ending.STOP: "end_turn",
    Ending.STOP_STRING: "stop_sequence",
    Ending.LENGTH: "max_tokens",
    Ending.TOOL_CALLS: "tool_use",
}


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answers a conversation, streaming or not."""
    service = service_of(request)
    body = await read_body(request, MessagesRequest)
    service.check_model(body.model)
    plans = await plan_answer(request, lambda body: _ask_of(body, body), body)
    builder = _MessageBuilder(service.model)
    with service.run(request, plans, cache_salt=body.cache_salt or "") as session:
        if body.stream:
            return await _stream(request, session, builder)
        (update,) = await session.collect()
        builder.events_of(update, session)
        return json_response(builder.message)


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of such a request has."""
    service = service_of(request)
    body = await read_body(request, CountRequest)
    service.check_model(body.model)
    return await service.aside.run(length_of(request), _count, service, body)


def _count(service: Service, body: CountRequest) -> web.Response:
    ask = _ask_of(body)
    service.check_countable(texts_of(ask.messages), "messages")
    return json_response({"input_tokens": len(render_prompt(service, ask))})


def _ask_of(body: CountRequest, sampled: MessagesRequest | None = None) -> Ask:
    """The request in no API's own words; `sampled` is None where only the prompt counts."""
    choice = body.tool_choice
    if choice is not None and choice.type == "tool" and not choice.name:
        raise ApiError(400, "tool_choice.name: the type 'tool' needs a name", param="tool_choice.name")
    output = body.output_config or OutputConfig()
    # Thinking is off unless asked for, as in the original.
    thinks = {"enable_thinking": body.thinking is not None and body.thinking.type != "disabled"}
    sampling = SamplingFields()
    if sampled is not None:
        sampling = SamplingFields(
            temperature=sampled.temperature,
            top_p=sampled.top_p,
            top_k=sampled.top_k,
            seed=sampled.seed,
            stop=sampled.stop_sequences,
        )
    return Ask(
        messages=to_messages(body),
        sampling=sampling,
        max_tokens=sampled.max_tokens if sampled else None,
        names={"max_output_tokens": "max_tokens"},
        use=ToolUse(
            tuple(to_tools(body)),
            required=choice is not None and choice.type == "any",
            only=choice.name if choice is not None and choice.type == "tool" else None,
            is_parallel=not (choice is not None and choice.disable_parallel_tool_use),
            strict=frozenset(tool.name for tool in body.tools or [] if tool.strict),
            is_forbidden=bool(body.tools) and choice is not None and choice.type == "none",
        ),
        schema=output.format.schema if output.format else None,
        schema_param="output_config.format.schema",
        options=reasoning_options(output.effort, thinks),
        stops=sampling.stop_strings(),
        continues_last=True,
    )


class _MessageBuilder:
    """Grows `message`, and says what the stream's events are."""

    def __init__(self, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._has_started = False
        self._is_open = False

    def events_of(self, update: Update, session: Session) -> list[dict[str, Any]]:
        """What an update adds; the first opens the stream, and the one with the ending closes it."""
        events: list[dict[str, Any]] = []
        if not self._has_started:
            self._has_started = True
            self.message["usage"] = _usage(session)
            events.append({"type": "message_start", "message": self.message | {"content": []}})
        for delta in update.deltas:
            events += self._add_delta(delta)
        if update.ending is not None:
            events += self._finish(update.ending, session)
        return events

    def _finish(self, ending: Ending, session: Session) -> list[dict[str, Any]]:
        self.message["stop_reason"] = _STOP_REASONS[ending]
        self.message["stop_sequence"] = session.choices[0].generation.stop_string
        self.message["usage"] = _usage(session)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _add_delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if isinstance(delta, TextDelta):
            yield from self._open({"type": "text", "text": ""})
            self.message["content"][-1]["text"] += delta.text
            yield self._delta({"type": "text_delta", "text": delta.text})
        elif isinstance(delta, ReasoningDelta):
            yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
            self.message["content"][-1]["thinking"] += delta.text
            yield self._delta({"type": "thinking_delta", "thinking": delta.text})
        else:
            yield from self._add_call(delta)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[dict[str, Any]]:
        yield from self._close()
        yield from self._open({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        self.message["content"][-1]["input"] = json.loads(delta.arguments)
        yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        content = self.message["content"]
        if self._is_open and content[-1]["type"] == block["type"]:
            return
        yield from self._close()
        content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(content) - 1, "content_block": dict(block)}

    def _close(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self.message["content"]) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.message["content"]) - 1, "delta": delta}


def _usage(session: Session) -> dict[str, Any]:
    (choice,) = session.choices
    cached = choice.cached_tokens
    return {
        "input_tokens": session.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": choice.generation.completion_tokens,
    }


async def _stream(request: web.Request, session: Session, builder: _MessageBuilder) -> web.StreamResponse:
    stream = EventStream(request, session)
    try:
        await stream.forward(lambda _, update: encode_named(builder.events_of(update, session)))
    except ApiError as error:
        if not stream.has_started:
            raise
        await stream.send(encode_named([anthropic_body(error)]))
    return await stream.close()
