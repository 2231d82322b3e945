"""`/openapi.json`: the API, described from the typed request bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from serve.replies import json_response
from serve.schemas.body import schema_of_type
from serve.schemas.chat import ChatRequest
from serve.schemas.completions import CompletionRequest
from serve.schemas.messages import CountRequest, MessagesRequest
from serve.schemas.responses import ResponsesRequest
from serve.schemas.tokens import DetokenizeRequest, TokenizeRequest

# Path, request body, whether it can stream, summary.
_POSTS: tuple[tuple[str, type[msgspec.Struct], bool, str], ...] = (
    ("/v1/chat/completions", ChatRequest, True, "OpenAI Chat Completions"),
    ("/v1/completions", CompletionRequest, True, "OpenAI Completions"),
    ("/v1/responses", ResponsesRequest, True, "OpenAI Responses"),
    ("/v1/messages", MessagesRequest, True, "Anthropic Messages"),
    ("/v1/messages/count_tokens", CountRequest, False, "Tokens of a Messages prompt"),
    ("/tokenize", TokenizeRequest, False, "Token ids of a prompt or a conversation"),
    ("/detokenize", DetokenizeRequest, False, "Text of token ids"),
)
_GETS = (
    ("/v1/models", "The served model", ()),
    ("/v1/models/{model}", "The served model by name", ("model",)),
    ("/v1/responses/{id}", "A stored response", ("id",)),
    ("/health", "Whether requests are taken", ()),
)
_ERRORS = {
    "400": "A field is at fault; `param` names it",
    "401": "No valid API key",
    "404": "No such model, response or path",
    "413": "The body is too large",
    "429": "The request queue is full; see Retry-After",
    "500": "The engine failed",
    "501": "This server has no tokenizer or no chat format",
    "503": "The server is shutting down",
    "504": "The request took too long",
}
_OBJECT = {"type": "object"}


async def get_openapi(request: web.Request) -> web.Response:
    """The description as OpenAPI 3.1."""
    return json_response(describe_api())


@cache
def describe_api() -> dict[str, Any]:
    """The OpenAPI document."""
    references, components = msgspec.json.schema_components(
        [body for _, body, _, _ in _POSTS], schema_hook=schema_of_type, ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {}
    for (path, _, streams, summary), schema in zip(_POSTS, references, strict=True):
        content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
        if streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": _responses(content)}}
    json_content = {"application/json": {"schema": _OBJECT}}
    for path, summary, names in _GETS:
        paths[path] = {"get": {"summary": summary, "responses": _responses(json_content)} | _path_parameters(names)}
    paths["/v1/responses/{id}"]["delete"] = {
        "summary": "Forget a stored response",
        "responses": _responses(json_content),
    } | _path_parameters(("id",))
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics",
            "responses": _responses({"text/plain": {"schema": {"type": "string"}}}),
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Resin", "version": "1", "description": "An LLM behind four public APIs."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    errors = {
        status: {"description": meaning, "content": {"application/json": {"schema": _OBJECT}}}
        for status, meaning in _ERRORS.items()
    }
    return {"200": {"description": "The answer", "content": content}} | errors


def _path_parameters(names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    }
