"""A server that answers well, and a proxy before it that spoils one thing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tests.serve.paged_runner import PagedScriptedRunner
from tests.serve.scripted_runner import TOKENIZER

USER = "<|im_start|>user\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>'


class EchoRunner(PagedScriptedRunner):
    """Says what it was asked, so that every question has an answer of its own; and what a few checks want to hear."""

    def __init__(self) -> None:
        super().__init__(step_s=0.0002)
        self.answer("What is the weather in Paris", CALL)
        self.answer('"sky": "clear"', "It is clear.")
        self.answer("Describe a dog.", '{"kind": "animal", "is_alive": true}')
        self.answer("What is 17 + 25?", "<think>\nSeven and five is twelve.\n</think>\n\n42")
        self.answer("Answer with the letter", "The answer is B.")

    def _response_to(self, sequence: list[int]) -> tuple[int, list[int]]:
        length, response = super()._response_to(sequence)
        if response is self._default:
            text = TOKENIZER.decode(sequence)
            asked = text[text.rfind(USER) + len(USER) :].partition("<|im_end|>")[0] if USER in text else text
            response = TOKENIZER.encode(f"You said: {asked}"[:200])
        return length, response


@dataclass(slots=True)
class Fault:
    """What the proxy changes.

    Attributes:
        request: gets and gives back the request's JSON; may take its time.
        answer: gets a whole JSON answer and changes it in place.
        events: gets and gives back the payloads of a stream.
        status: gets and gives back the status.
        headers: of the answer.
    """

    request: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    answer: Callable[[dict[str, Any]], Any] | None = None
    events: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    status: Callable[[int, str], int] | None = None
    delay_s: Callable[[dict[str, Any]], float] | None = None
    content_type: str | None = None
    omits_done: bool = False


@contextlib.asynccontextmanager
async def proxied(upstream: str, fault: Fault) -> AsyncIterator[str]:
    """The address of a server that is `upstream` with a fault."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            data = await _changed_request(request, fault)
            headers = {"Content-Type": "application/json"}
            async with session.request(
                request.method, upstream + request.path, data=io.BytesIO(data), headers=headers
            ) as response:
                return await _changed_answer(request, response, fault)

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _changed_request(request: web.Request, fault: Fault) -> bytes:
    data = await request.read()
    try:
        body = json.loads(data)
    except ValueError:
        return data
    if not isinstance(body, dict):
        return data
    if fault.delay_s is not None:
        await asyncio.sleep(fault.delay_s(body))
    return data if fault.request is None else json.dumps(fault.request(body)).encode()


async def _changed_answer(request: web.Request, response: aiohttp.ClientResponse, fault: Fault) -> web.StreamResponse:
    data = await response.read()
    status = response.status if fault.status is None else fault.status(response.status, request.path)
    if response.content_type == "text/event-stream":
        return await _send_events(request, data, fault)
    if fault.answer is not None and response.content_type == "application/json":
        body = json.loads(data)
        with contextlib.suppress(KeyError):  # the fault concerns another kind of answer
            fault.answer(body)
        data = json.dumps(body).encode()
    return web.Response(status=status, body=data, content_type=response.content_type)


async def _send_events(request: web.Request, data: bytes, fault: Fault) -> web.StreamResponse:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    events = [json.loads(line) for line in lines]
    if fault.events is not None:
        events = fault.events(events)
    stream = web.StreamResponse(headers={"Content-Type": fault.content_type or "text/event-stream"})
    await stream.prepare(request)
    for event in events:
        await stream.write(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
    await stream.write(b"" if fault.omits_done else b"data: [DONE]\n\n")
    return stream
