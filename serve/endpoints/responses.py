"""`/v1/responses`."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from aiohttp import web

from resin.recipes import Message, Role, Text
from serve.errors import ApiError
from serve.generation import Update
from serve.planning import Ask, ToolUse, plan_answer, reasoning_options
from serve.replies import json_answer, json_response, read_body, usage_of
from serve.response_builder import Event, ResponseBuilder
from serve.schemas.responses import FunctionChoice, ResponsesRequest, function_tools, input_messages, schema_of
from serve.schemas.sampling import SamplingFields
from serve.service import Service, length_of, service_of
from serve.session import Session
from serve.sse import EventStream, encode_named


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answers an input, on top of an earlier response if it names one."""
    service = service_of(request)
    body = await read_body(request, ResponsesRequest)
    service.check_model(body.model)
    earlier = _earlier_messages(service, body)
    conversation = await service.aside.run(length_of(request), lambda: [*earlier, *input_messages(body)])
    plans = await plan_answer(request, lambda body: _ask_of(body, conversation), body)
    builder = ResponseBuilder(_blank_response(service, body), service.tokenizer)
    with service.run(request, plans, cache_salt=body.cache_salt or "") as session:
        if body.stream:
            response = await _stream(request, session, builder)
        else:
            response = await json_answer(request, session, lambda updates: _whole(builder, session, updates))
    if body.store is not False and builder.response["status"] in ("completed", "incomplete"):
        service.responses.put(builder.response, [*conversation, builder.turn()])
    return response


async def get_response(request: web.Request) -> web.Response:
    """A stored response."""
    stored = service_of(request).responses.get(request.match_info["id"])
    if stored is None:
        raise _not_found(request.match_info["id"])
    return json_response(stored.response)


async def delete_response(request: web.Request) -> web.Response:
    """Forgets a stored response."""
    response_id = request.match_info["id"]
    if not service_of(request).responses.delete(response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _not_found(response_id: str, param: str | None = None) -> ApiError:
    message = f"there is no stored response {response_id!r}; the oldest are forgotten"
    return ApiError(404, message, param=param, code="response_not_found")


def _earlier_messages(service: Service, body: ResponsesRequest) -> tuple[Message, ...]:
    if body.previous_response_id is None:
        return ()
    stored = service.responses.get(body.previous_response_id)
    if stored is None:
        raise _not_found(body.previous_response_id, "previous_response_id")
    return stored.messages


def _ask_of(body: ResponsesRequest, conversation: list[Message]) -> Ask:
    tools = [] if body.tool_choice == "none" else function_tools(body)
    instructions = [Message(Role.SYSTEM, [Text(body.instructions)])] if body.instructions else []
    sampling = SamplingFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, seed=body.seed, stop=body.stop
    )
    return Ask(
        messages=[*instructions, *conversation],
        sampling=sampling,
        max_tokens=body.max_output_tokens,
        names={"max_output_tokens": "max_output_tokens"},
        use=ToolUse(
            tuple(tools),
            required=body.tool_choice == "required",
            only=body.tool_choice.name if isinstance(body.tool_choice, FunctionChoice) else None,
            is_parallel=body.parallel_tool_calls is not False,
            strict=frozenset(tool.name or "" for tool in body.tools or [] if tool.strict),
            is_forbidden=bool(body.tools) and body.tool_choice == "none",
        ),
        schema=schema_of(body),
        schema_param="text.format.schema",
        options=reasoning_options(body.reasoning.effort if body.reasoning else None),
        stops=sampling.stop_strings(),
        logprobs=body.logprobs,
    )


def _blank_response(service: Service, body: ResponsesRequest) -> dict[str, Any]:
    choice = body.tool_choice
    text_format = body.text.format if body.text and body.text.format else None
    defaults = service.sampling
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": service.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": _plain(text_format) if text_format else {"type": "text"}},
        "tool_choice": _plain(choice) if isinstance(choice, FunctionChoice) else choice or "auto",
        "tools": [_plain(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _plain(value: Any) -> dict[str, Any]:
    return dict(msgspec.to_builtins(value))


def _usage(session: Session) -> dict[str, Any]:
    usage = usage_of(session)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _finish(builder: ResponseBuilder, session: Session) -> list[Event]:
    ending = session.choices[0].generation.ending
    assert ending is not None
    return builder.finish(ending, _usage(session))


def _whole(builder: ResponseBuilder, session: Session, updates: list[Update]) -> dict[str, Any]:
    (update,) = updates
    builder.add(update)
    _finish(builder, session)
    return builder.response


async def _stream(request: web.Request, session: Session, builder: ResponseBuilder) -> web.StreamResponse:
    stream = EventStream(request, session)
    try:
        await stream.forward(lambda _, update: encode_named(builder.add(update)))
        await stream.send(encode_named(_finish(builder, session)))
    except ApiError as error:
        if not stream.has_started:
            raise
        await stream.send(encode_named(builder.fail(error)))
    return await stream.close()
