"""The aiohttp application: routes, and what happens around every request."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from aiohttp import web
from aiohttp.hdrs import METH_ALL

from serve.endpoints.chat import create_chat_completion
from serve.endpoints.completions import create_completion
from serve.endpoints.messages import count_tokens, create_message
from serve.endpoints.openapi import get_openapi
from serve.endpoints.page import get_page
from serve.endpoints.responses import create_response, delete_response, get_response
from serve.endpoints.status import get_health, get_metrics, get_model, list_models
from serve.endpoints.tokens import detokenize, tokenize
from serve.errors import ApiError, anthropic_body, failed, openai_body
from serve.origins import OriginPolicy
from serve.replies import json_response
from serve.service import SERVICE, Service, service_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_LOG = logging.getLogger("resin.serve")
_ACCESS = logging.getLogger("resin.access")
REQUEST_ID = web.RequestKey("request_id", str)
_GIVEN_ID = re.compile(r"[\w.:\-]{1,128}")
_OPEN_PATHS = ("/", "/health")
_POLICY: web.AppKey[OriginPolicy] = web.AppKey("origins", OriginPolicy)


def build_app(service: Service) -> web.Application:
    """The application that answers for a service."""
    app = web.Application(
        middlewares=[_observe, _answer_errors, _check_origin, _authorise],
        client_max_size=service.config.max_body_bytes,
    )
    app[SERVICE] = service
    app[_POLICY] = OriginPolicy(service.config)
    app.on_response_prepare.append(_add_headers)
    app.router.add_post("/v1/chat/completions", create_chat_completion)
    app.router.add_post("/v1/completions", create_completion)
    app.router.add_post("/v1/responses", create_response)
    app.router.add_get("/v1/responses/{id}", get_response)
    app.router.add_delete("/v1/responses/{id}", delete_response)
    app.router.add_post("/v1/messages", create_message)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", get_model)
    app.router.add_get("/health", get_health)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/openapi.json", get_openapi)
    app.router.add_get("/", get_page)
    app.router.add_get("/page/{name:.+}", get_page)
    return app


@web.middleware
async def _observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Request id, access log and metrics."""
    given = request.headers.get("x-request-id", "")
    request_id = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
    request[REQUEST_ID] = request_id
    metrics = service_of(request).metrics
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else "unknown"
    started = time.perf_counter()
    status = 499  # the client left
    metrics.in_progress.inc()
    try:
        response = await handler(request)
        status = response.status
        return response
    except BaseException:
        metrics.disconnects.inc()
        raise
    finally:
        seconds = time.perf_counter() - started
        metrics.in_progress.dec()
        method = request.method if request.method in METH_ALL else "other"  # anything may stand there
        metrics.requests.labels(path, method, str(status)).inc()
        metrics.seconds.labels(path).observe(seconds)
        _ACCESS.info(
            json.dumps(
                {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "remote": request.remote,
                    "method": request.method,
                    "path": request.path,
                    "status": status,
                    "seconds": round(seconds, 4),
                }
            )
        )


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: what the headers of every answer hold, streams included."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
    response.headers.update(request.app[_POLICY].headers_for(request))


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in the API's own shape; nothing of the server's inside leaks."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(
            request, ApiError(error.status, error.reason, code=error.reason.lower().replace(" ", "_"))
        )
    except ConnectionResetError:
        raise
    except Exception:
        _LOG.exception("request %s failed", request[REQUEST_ID])
        return _error_response(request, failed("internal error"))


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    body = anthropic_body(error) if request.path.startswith("/v1/messages") else openai_body(error)
    return json_response(body, status=error.status, headers=error.headers)


@web.middleware
async def _check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    policy = request.app[_POLICY]
    policy.check(request)
    return policy.preflight(request) or await handler(request)


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys = service_of(request).config.api_keys
    is_open = request.path in _OPEN_PATHS or request.path.startswith("/page/")
    if keys and not is_open:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not any(hmac.compare_digest(_raw(given), _raw(key)) for key in keys):
            raise ApiError(401, "a valid API key is needed", kind="authentication_error", code="invalid_api_key")
    return await handler(request)


def _raw(header: str) -> bytes:
    """The bytes that came over the wire, UTF-8 or not."""
    return header.encode("utf-8", "surrogateescape")
