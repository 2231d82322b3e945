"""`/v1/models`, `/health` and `/metrics`."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from serve.errors import ApiError
from serve.replies import json_response
from serve.service import Service, service_of


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created_s,
        "owned_by": "resin",
        "max_model_len": service.engine.context_length,
    }


async def list_models(request: web.Request) -> web.Response:
    """The one model."""
    return json_response({"object": "list", "data": [_model(service_of(request))]})


async def get_model(request: web.Request) -> web.Response:
    """The model, if it is asked for by its name."""
    service = service_of(request)
    name = request.match_info["model"]
    if name != service.model:
        message = f"the model {name!r} does not exist; this server has {service.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return json_response(_model(service))


async def get_health(request: web.Request) -> web.Response:
    """200 while requests are taken and served, 503 while the server drains or its engine makes no step."""
    service = service_of(request)
    room = service.engine.context_length - 1
    longest = min(service.config.max_output_tokens or room, room)
    status = "draining" if service.is_draining else "stalled" if service.actor.is_stalled else "ok"
    state = {
        "status": status,
        "model": service.model,
        "replicas": 1,
        "context_length": service.engine.context_length,
        "chat": service.recipe is not None,
        "thinking": service.can_switch_thinking,
        "sampling": service.sampling.params(),
        "max_output_tokens": longest,
        "answer_tokens": min(service.sampling.max_output_tokens, longest),  # what the page asks for
        "active_sessions": service.actor.active,
        "queued": service.actor.queued,
        "config": service.engine.resolved.as_record(),
    }
    return json_response(state, status=200 if status == "ok" else 503)


async def get_metrics(request: web.Request) -> web.Response:
    """Engine and HTTP metrics for Prometheus."""
    service = service_of(request)
    engine = service.engine.metrics
    text = service.metrics.exposition(engine.registry if engine is not None else None)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
