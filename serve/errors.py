"""Errors that clients see, before they take one API's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resin.plan import InvalidRequest


class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: HTTP status.
        message: what went wrong, for a person.
        kind: OpenAI's `type`.
        param: the offending field as the client spelled it.
        code: a short constant for programs.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """A 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


def from_invalid_request(error: InvalidRequest, names: Mapping[str, str] | None = None) -> ApiError:
    """A 400 from the library's own complaint; `names` maps its fields to the client's."""
    param = (names or {}).get(error.field, error.field)
    message = str(error)
    if param != error.field and message.startswith(error.field):
        message = param + message[len(error.field) :]
    return invalid(param, message)


def overloaded(retry_after_s: int) -> ApiError:
    """The intake queue is full."""
    return ApiError(
        429,
        "the server's request queue is full; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str) -> ApiError:
    """The server is going away."""
    return ApiError(503, message, kind="service_unavailable_error", code="unavailable")


def timed_out(limit_s: float) -> ApiError:
    """The request ran into `request_timeout_s`."""
    return ApiError(504, f"the request took longer than {limit_s:g} s", kind="timeout_error", code="timeout")


def failed(message: str) -> ApiError:
    """The engine or the server is broken."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def openai_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
