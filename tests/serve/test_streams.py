"""Streams on their way to a client: the bytes of events, pauses, and clients of an older HTTP."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resin import FinishReason
from resin.events import TokensEvent
from resin.recipes import ReasoningDelta, TextDelta
from serve import HttpServer
from serve.endpoints.chat import _Reply
from serve.errors import ApiError
from serve.generation import Ending, Generation, PlainParser, Update
from serve.schemas.chat import ChatRequest
from serve.service import Service
from serve.session import Choice, Session
from serve.sse import encode_events
from serve.text_rows import ScoredText, TokenLogprob
from tests.serve.conftest import WORDS
from tests.serve.scripted_runner import TOKENIZER

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
ROWS = (TokenLogprob(97, -1.0),)


def scored(text: str) -> TextDelta:
    return ScoredText(text, logprobs=ROWS)


UPDATES = st.lists(
    st.builds(
        Update,
        deltas=st.lists(st.one_of(*(TEXTS.map(kind) for kind in (TextDelta, ReasoningDelta, scored))), max_size=2),
        ending=st.sampled_from([None, None, None, Ending.STOP]),
    ),
    max_size=6,
)

USAGES = st.sampled_from([None, "include_usage", "continuous_usage_stats"])


@given(updates=UPDATES, index=st.integers(0, 3), usage=USAGES, logprobs=st.booleans(), model=TEXTS)
def test_chat_events_are_what_the_encoder_makes_of_whole_chunks(
    updates: list[Update], index: int, usage: str | None, logprobs: bool, model: str
) -> None:
    service = cast(Service, SimpleNamespace(model=model, tokenizer=TOKENIZER))
    options = {usage: True} if usage else {}
    messages = [{"role": "user", "content": "x"}]
    body = msgspec.convert({"messages": messages, "logprobs": logprobs, "stream_options": options}, ChatRequest)
    reply = _Reply(service, body)
    numbers = {"prompt_tokens": 1} if reply.usage_goes_on else None
    choice = cast(Choice, SimpleNamespace(index=index))
    for number, update in enumerate(updates):
        whole = encode_events(reply.chunks_of(index, update, numbers, is_first=number == 0))
        assert reply.encode(choice, update, numbers) == whole


class Listener:
    """A session of one choice and what its handler is given."""

    def __init__(self, *, full_after: int = 1 << 30) -> None:
        self.slow = 0
        self.session = Session(stream_interval=1, buffer_events=2, timeout_s=9, on_slow=self._on_slow)
        self.choice = self.session.add_choice(Generation(PlainParser(TOKENIZER)))
        self.texts: list[str] = []
        self.may_go_on = asyncio.Event()
        self._full_after = full_after

    def _on_slow(self) -> None:
        self.slow += 1

    def say(self, text: str) -> None:
        event = TokensEvent((), np.zeros(0, np.int32), np.zeros(1, np.int64))
        for token_id in TOKENIZER.encode(text):
            if self.choice.on_tokens([token_id], event, 0):
                self.choice.flush()

    def end(self, reason: FinishReason) -> None:
        if self.choice.on_finish(reason, None):
            self.choice.flush()

    def take(self, choice: Choice, update: Update) -> bool:
        self.texts += [cast(Any, delta).text for delta in update.deltas]
        return len(self.texts) == self._full_after

    async def drain(self) -> None:
        with self.session.sending():
            await self.may_go_on.wait()


async def test_tokens_go_out_one_by_one_until_the_reader_is_full_and_then_together() -> None:
    listener = Listener(full_after=3)
    listener.say("a")  # before anybody listens
    handler = asyncio.ensure_future(listener.session.deliver(listener.take, listener.drain))
    await asyncio.sleep(0)
    listener.say("bcde")
    assert listener.texts == ["a", "b", "c"]
    await asyncio.sleep(0)
    listener.say("fg")
    assert not listener.slow  # as many steps as may wait
    listener.may_go_on.set()
    await asyncio.sleep(0.01)
    assert listener.texts == ["a", "b", "c", "defg"]
    listener.say("h")
    listener.end(FinishReason.STOP)
    await asyncio.wait_for(handler, 1)
    assert listener.texts == ["a", "b", "c", "defg", "h"]


async def test_a_reader_that_stays_full_is_reported_once() -> None:
    listener = Listener(full_after=1)
    handler = asyncio.ensure_future(listener.session.deliver(listener.take, listener.drain))
    await asyncio.sleep(0)
    listener.say("a")
    await asyncio.sleep(0)
    listener.say("bcdefg")
    assert listener.slow == 1
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    listener.say("h")  # nobody listens any more
    assert listener.texts == ["a"]


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.CANCELLED, 503), (FinishReason.ERROR, 500)])
async def test_a_bad_ending_is_the_handlers_error(reason: FinishReason, status: int) -> None:
    listener = Listener()
    handler = asyncio.ensure_future(listener.session.collect())
    await asyncio.sleep(0)
    listener.say("a")
    listener.end(reason)
    with pytest.raises(ApiError) as error:
        await asyncio.wait_for(handler, 1)
    assert error.value.status == status


async def test_an_error_while_sending_is_the_handlers() -> None:
    listener = Listener()

    def take(choice: Choice, update: Update) -> bool:
        raise ConnectionResetError("gone")

    handler = asyncio.ensure_future(listener.session.deliver(take))
    await asyncio.sleep(0)
    listener.say("a")
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(handler, 1)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_streams_of_either_http_version(server: HttpServer, version: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "[words]"}], "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + b"\r\n" + body)
    head_bytes, _, data = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    is_chunked = b"transfer-encoding: chunked" in head_bytes.lower()
    assert is_chunked == (version == "1.1")
    if is_chunked:
        rest, data = data, b""
        while size := int(rest[: rest.index(b"\r\n")], 16):
            start = rest.index(b"\r\n") + 2
            data += rest[start : start + size]
            assert rest[start + size : start + size + 2] == b"\r\n"
            rest = rest[start + size + 2 :]
        assert rest == b"0\r\n\r\n"
    *events, last = data.decode().strip().split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == WORDS
