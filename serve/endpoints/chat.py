"""`/v1/chat/completions`."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from resin.recipes import Delta, Goal, Parser, ReasoningDelta, TextDelta, Tokenizer, Tool
from serve.errors import ApiError, invalid, openai_body
from serve.generation import Ending, Generation, TokenLogprob, Update
from serve.logprobs import chat_logprobs
from serve.replies import json_response, read_body, template_options, usage_of
from serve.schemas.chat import ChatRequest, ToolChoice, to_messages, to_tools
from serve.schemas.sampling import build_params
from serve.service import Plan, Service, service_of
from serve.session import Session
from serve.sse import EventStream

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
    plans = await plan_choices(service, body)
    reply = _Reply(service, body)
    with service.run(request, plans, cache_salt=body.cache_salt or "") as session:
        if body.stream:
            return await _stream(request, session, reply)
        return json_response(await reply.collect(session))


async def plan_choices(service: Service, body: ChatRequest) -> list[Plan]:
    """The prompt and policy of each choice.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    tools = [] if body.tool_choice == "none" else to_tools(body.tools)
    options = template_options(body.reasoning_effort, body.chat_template_kwargs)
    prompt_ids = await service.render(to_messages(body.messages), tools, options)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = service.output_tokens(asked or None, len(prompt_ids), limit_name)
    recipe = service.recipe
    assert recipe is not None
    count = service.choices(body.n)
    goal, goal_param = goal_of(body, tools)
    masks = await service.masks(goal, prompt_ids, count, goal_param)
    params = build_params(
        body,
        max_output_tokens=limit,
        stop_token_ids=recipe.stop_token_ids,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        names={"max_output_tokens": limit_name},
    )
    return [
        Plan(
            prompt_ids,
            dataclasses.replace(
                params, seed=None if params.seed is None else params.seed + index, allowed_tokens=masks[index]
            ),
            Generation(
                _create_parser(service, prompt_ids, tools),
                stops=body.stop_strings(),
                stop_token_ids=params.stop_token_ids,
                wants_logprobs=bool(body.logprobs),
            ),
        )
        for index in range(count)
    ]


def goal_of(body: ChatRequest, tools: Sequence[Tool]) -> tuple[Goal | None, str]:
    """What the response is bound to, and which field says so.

    Raises:
        ApiError: a tool choice without such a tool, or a response format without its schema.
    """
    schema = _schema_of(body)
    one_or_more = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        chosen = tuple(tool for tool in tools if tool.name == name)
        if not chosen:
            raise invalid("tool_choice", f"tool_choice: there is no tool named {name!r}")
        return Goal(tools=chosen, is_parallel=False), "tool_choice"
    if body.tool_choice == "required":
        if not tools:
            raise invalid("tool_choice", "tool_choice: 'required' needs tools")
        return Goal(tools=tuple(tools), is_parallel=one_or_more), "tools"
    if schema is not None:
        return Goal(schema=schema, tools=tuple(tools), is_parallel=one_or_more), "response_format"
    if tools and (not one_or_more or any(tool.function.strict for tool in body.tools or [])):
        return Goal(tools=tuple(tools), is_parallel=one_or_more, allows_text=True), "tools"
    return None, ""


def _schema_of(body: ChatRequest) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise invalid("response_format.json_schema.schema", "response_format: json_schema needs a schema")
    return wanted.json_schema.schema


def _create_parser(service: Service, prompt_ids: Sequence[int], tools: Sequence[Tool]) -> Parser:
    assert service.recipe is not None
    return service.recipe.create_parser(prompt_ids, tools=tools)


class _Reply:
    """What all chunks of one answer share."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = service.model
        self.tokenizer: Tokenizer | None = service.tokenizer if body.logprobs else None
        self.includes_usage = bool(body.stream_options and body.stream_options.include_usage)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = self.head("chat.completion.chunk") | {"choices": choices}
        if self.includes_usage:
            chunk["usage"] = usage
        return chunk

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self.tokenizer is None else chat_logprobs(entries, self.tokenizer)

    def chunks_of(self, index: int, update: Update, *, is_first: bool) -> list[dict[str, Any]]:
        """An update as chunks: one a delta, and one for the ending."""
        deltas = [_delta_fields(delta) for delta in update.deltas]
        if is_first:
            deltas.insert(0, {"role": "assistant", "content": ""})
        elif update.logprobs and not deltas:
            deltas.append({"content": ""})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": fields, "logprobs": None, "finish_reason": None} for fields in deltas
        ]
        if choices and update.logprobs:
            choices[-1]["logprobs"] = self.logprobs(update.logprobs)
        if update.ending is not None:
            finish = FINISH_REASONS[update.ending]
            choices.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish})
        return [self.chunk([choice]) for choice in choices]

    async def collect(self, session: Session) -> dict[str, Any]:
        """The whole answer at once."""
        whole = [Update() for _ in session.choices]
        async for choice, update in session.updates():
            for delta in update.deltas:
                whole[choice.index].add(delta)
            whole[choice.index].logprobs += update.logprobs
            whole[choice.index].ending = update.ending
        choices = []
        for index, update in enumerate(whole):
            assert update.ending is not None
            choices.append(
                {
                    "index": index,
                    "message": message_of(update.deltas),
                    "logprobs": self.logprobs(update.logprobs),
                    "finish_reason": FINISH_REASONS[update.ending],
                }
            )
        return self.head("chat.completion") | {"choices": choices, "usage": usage_of(session)}


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
    started: set[int] = set()
    try:
        async for choice, update in session.updates():
            chunks = reply.chunks_of(choice.index, update, is_first=choice.index not in started)
            started.add(choice.index)
            await stream.send_many(chunks)
        if reply.includes_usage:
            await stream.send(reply.chunk([], usage_of(session)))
    except ApiError as error:
        if not stream.has_started:
            raise
        await stream.send(openai_body(error))
    return await stream.close(b"data: [DONE]\n\n")
