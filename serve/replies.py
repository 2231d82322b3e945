"""Reading bodies and writing JSON, the same way for every API."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from serve.errors import ApiError, invalid
from serve.schemas.body import decode_body
from serve.session import Session

T = TypeVar("T", bound=msgspec.Struct)

RANK_HEADER = "resin-routed-dp-rank"


async def read_body(request: web.Request, kind: type[T]) -> T:
    """The typed body.

    Raises:
        ApiError: 400 naming the field, 413 if the body is too large.
    """
    rank = request.headers.get(RANK_HEADER)
    if rank is not None and rank.strip() != "0":
        raise invalid(RANK_HEADER, f"{RANK_HEADER}: expected 0, the only replica, got {rank!r}")
    try:
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(413, f"the body is too large: {error.text}", code="body_too_large") from error
    return decode_body(data, kind)


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
