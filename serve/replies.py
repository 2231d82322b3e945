"""Reading bodies and writing JSON, the same way for every API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from serve.body_shape import check_shape
from serve.errors import ApiError, invalid
from serve.generation import Update
from serve.schemas.body import decode_body
from serve.service import BODY_BYTES, REPLICA, service_of
from serve.session import Choice, Session

T = TypeVar("T", bound=msgspec.Struct)

RANK_HEADER, BODY_RANK = "resin-routed-dp-rank", "routed_dp_rank"


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The typed body.

    Raises:
        ApiError: 400 naming the field, 408 if the body is slow to come, 413 if it is too large, 415 if it is not said
            to be JSON.
    """
    wanted = _replica_of(request)
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        given = request.headers.get("Content-Type", "")
        message = f"content-type: expected application/json in UTF-8, got {given!r}"
        raise ApiError(415, message, param="content-type", code="unsupported_media_type")
    data = await _read(request)
    request[BODY_BYTES] = len(data)
    body = await service_of(request).aside.run(len(data), _decode, request, data, kind)
    request[REPLICA] = wanted if wanted is not None else _check_replica(request, BODY_RANK, body)
    return body


def _replica_of(request: web.Request) -> int | None:
    """The replica that the header names."""
    text = request.headers.get(RANK_HEADER)
    if text is None:
        return None
    number = int(text) if text.strip().isascii() and text.strip().isdecimal() else -1
    return _known_replica(request, RANK_HEADER, text, number)


def _check_replica(request: web.Request, param: str, body: Any) -> int | None:
    rank = getattr(body, param, None)
    return None if rank is None else _known_replica(request, param, rank, rank)


def _known_replica(request: web.Request, param: str, given: object, number: int) -> int:
    count = service_of(request).engine.config.replicas
    if number not in range(count):
        expected = "0, the only replica" if count == 1 else f"0 to {count - 1}"
        raise invalid(param, f"{param}: expected {expected}, got {given!r}")
    return number


def _decode(request: web.Request, data: bytes, kind: type[T]) -> T:
    check_shape(data, extra=service_of(request).engine.context_length)
    return decode_body(data, kind)


async def _read(request: web.Request) -> bytes:
    limit_s = service_of(request).config.client_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the body took longer than {limit_s:g} s", kind="timeout_error", code="slow_body"
        ) from None
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(413, f"the body is too large: {error.text}", code="body_too_large") from error
    except web.RequestPayloadError as error:  # chunks or compression gone wrong
        raise invalid(None, "the body is damaged: its chunks or its compression do not hold") from error


async def json_answer(
    request: web.Request, session: Session, build: Callable[[list[Update]], dict[str, Any]]
) -> web.Response:
    """The whole of every choice as `build` writes it down."""
    updates = await session.collect()
    length = sum(map(answer_length, session.choices))
    return await service_of(request).aside.run(length, lambda: json_response(build(updates)))


def answer_length(choice: Choice) -> int:
    """Tokens and alternatives of a choice so far, those of an echoed prompt included."""
    assert choice.job is not None
    params = choice.job.params
    prompt = 0 if params.prompt_logprobs is None else len(choice.job.prompt_ids) * (1 + params.prompt_logprobs)
    return prompt + choice.generation.completion_tokens * (1 + (params.logprobs or 0))


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, headers=headers, content_type="application/json"
    )


def usage_of(session: Session, prompts: int = 1) -> dict[str, Any]:
    """OpenAI's `usage`; each of the session's prompts counts once however many choices it has."""
    completion = sum(choice.generation.completion_tokens for choice in session.choices)
    reasoning = sum(choice.generation.reasoning_tokens for choice in session.choices)
    count = len(session.choices) // prompts
    groups = (session.choices[start : start + count] for start in range(0, len(session.choices), count))
    cached = sum(max(choice.cached_tokens for choice in group) for group in groups)
    return {
        "prompt_tokens": session.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": session.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
