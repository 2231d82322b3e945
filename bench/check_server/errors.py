"""What the server makes of requests that are wrong."""

from __future__ import annotations

from typing import Any

from bench.check_server.api import CHAT, COMPLETIONS, Api, Reply
from bench.check_server.outcome import Failed, Figures, Skipped, require


def judge_error(reply: Reply, what: str) -> None:
    """Raises Failed unless the answer is a 4xx with an error object that has a message."""
    if reply.status == 200:
        raise Failed(f"{what} is answered with 200: {reply.excerpt}")
    require(400 <= reply.status < 500, f"{what} is answered with {reply.status}: {reply.excerpt}")
    error = reply.json().get("error")
    message = error.get("message") if isinstance(error, dict) else None
    require(isinstance(message, str) and message, f"{what}: the body has no error.message: {reply.excerpt}")


async def check_broken_json(api: Api, figures: Figures) -> None:
    """A body that is no JSON."""
    judge_error(await api.post(CHAT, b'{"messages": [{"role": '), "broken JSON")


async def check_missing_field(api: Api, figures: Figures) -> None:
    """A chat request without messages."""
    judge_error(await api.post(CHAT, {"model": api.model}), "a chat request without messages")


async def check_wrong_type(api: Api, figures: Figures) -> None:
    """A field of the wrong type, and messages of the wrong type."""
    judge_error(await api.chat("Hello", temperature="warm"), "temperature='warm'")
    judge_error(await api.post(CHAT, {"model": api.model, "messages": 5}), "messages=5")


async def check_unknown_model(api: Api, figures: Figures) -> None:
    """A model that nobody has."""
    reply = await api.post(CHAT, api.chat_body("Hello", max_tokens=1) | {"model": "no-such-model-5f2c"})
    if reply.status == 200:
        raise Skipped("the server answers for every model name")
    judge_error(reply, "an unknown model")


async def check_unknown_path(api: Api, figures: Figures) -> None:
    """A path that does not exist is a 404."""
    reply = await api.get("/v1/no-such-path")
    require(reply.status == 404, f"status {reply.status}")


async def check_api_key(api: Api, figures: Figures) -> None:
    """A wrong key is refused, where the server asks for one."""
    reply = await api.post(CHAT, api.chat_body("Hello", max_tokens=1), {"Authorization": "Bearer wrong-5f2c"})
    if reply.status == 200:
        raise Skipped("the server asks for no key")
    require(reply.status in (401, 403), f"a wrong key is answered with {reply.status}")
    judge_error(reply, "a wrong key")


async def check_long_prompt(api: Api, figures: Figures) -> None:
    """A prompt beyond every context is refused with an error, not cut in silence and not with a crash."""
    reply = await api.chat("word " * 250_000, max_tokens=1)
    figures["status"] = reply.status
    if reply.status == 200:
        raise Skipped("the server took a prompt of 250,000 words")
    if not 400 <= reply.status < 500:
        raise Failed(f"status {reply.status} for a prompt of 250,000 words: {reply.excerpt}")


async def check_malformed_bodies(api: Api, figures: Figures) -> None:
    """Wrong values in every field never make a 5xx."""
    broken = []
    for path, body in malformed_bodies(api):
        reply = await api.post(path, body)
        kind = f"status_{reply.status // 100}xx"
        figures[kind] = figures.get(kind, 0) + 1
        if reply.status >= 500:
            broken.append(f"{reply.status} for {_difference(api, body)}")
    require(not broken, "; ".join(broken))


def _difference(api: Api, body: dict[str, Any] | bytes) -> str:
    if isinstance(body, bytes):
        return repr(body[:20])
    good = api.chat_body("Hello", max_tokens=1)
    return ", ".join(f"{name}={value!r}" for name, value in body.items() if good.get(name) != value)


def malformed_bodies(api: Api) -> list[tuple[str, dict[str, Any] | bytes]]:
    """Bodies with one fault each, and some that are no objects."""
    wrong: dict[str, list[Any]] = {
        "messages": [None, "x", [], [5], [{}], [{"role": 7, "content": "x"}], [{"role": "user", "content": 5}]],
        "temperature": [[], {}, -1, "x"],
        "top_p": [[], "x", 9],
        "max_tokens": ["x", [], {}],
        "stop": [5, {}, [5]],
        "n": ["x", [], -3],
        "stream": ["x", 7, []],
        "tools": [5, [5], [{"type": "function"}]],
        "response_format": [5, {"type": "xml"}, {"type": "json_schema"}],
        "logit_bias": [5, [], {"x": "y"}],
        "logprobs": ["x", []],
    }
    base = api.chat_body("Hello", max_tokens=1)
    bodies: list[tuple[str, dict[str, Any] | bytes]] = [
        (CHAT, base | {name: value}) for name, values in wrong.items() for value in values
    ]
    bodies += [(CHAT, data) for data in (b"", b"[]", b"null", b"5", b"\xff\xfe", b"[" * 2000)]
    prompts: list[Any] = [None, 5, {}, [None], [[]], [-1]]
    bodies += [(COMPLETIONS, api.completion_body("x", max_tokens=1) | {"prompt": prompt}) for prompt in prompts]
    return bodies
