"""Work beside the event loop: what goes there, how much of it, and how bodies are bounded."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from serve.aside import SHORT, THREADS, Aside
from serve.body_shape import MOST_CONTAINERS, MOST_VALUES, SMALL_BYTES, _count, check_shape
from serve.errors import ApiError
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner
from tests.serve.test_invalid_requests import MESSAGES, post


def aside(**changes: Any) -> Aside:
    return Aside(**{"capacity": 10, "timeout_s": 10.0, "retry_after_s": 1} | changes)


async def test_short_work_stays_and_long_work_leaves_the_loop() -> None:
    work = aside()
    assert await work.run(SHORT, threading.current_thread) is threading.current_thread()
    assert (await work.run(SHORT + 1, threading.current_thread)).name.startswith("resin-aside")
    with pytest.raises(ZeroDivisionError):
        await work.run(SHORT + 1, lambda: 1 / 0)
    work.close()


async def test_work_has_a_line_and_a_time() -> None:
    work = aside(capacity=THREADS + 1, timeout_s=0.2)
    gate = threading.Event()
    try:
        busy = [asyncio.ensure_future(work.run(SHORT + 1, gate.wait)) for _ in range(THREADS + 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as error:
            await work.run(SHORT + 1, gate.wait)
        assert error.value.status == 429
        results = await asyncio.gather(*busy, return_exceptions=True)
        assert [getattr(result, "status", None) for result in results] == [504] * (THREADS + 1)
    finally:
        gate.set()
    assert await work.run(SHORT + 1, lambda: "again") == "again"
    work.close()


async def test_work_of_a_client_that_left_is_not_begun() -> None:
    work = aside()
    gate, begun = threading.Event(), []
    busy = [asyncio.ensure_future(work.run(SHORT + 1, gate.wait)) for _ in range(THREADS)]
    waiting = asyncio.ensure_future(work.run(SHORT + 1, begun.append, 1))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    gate.set()
    await asyncio.gather(*busy)
    await work.run(SHORT + 1, lambda: None)
    assert not begun
    work.close()


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        ([], (0, 1)),
        ([1, 2, {"a": [3, 4]}], (3, 3)),
        ({"a,[": "b,{", "c": [",", "\\", '"', '\\",[', "\\\\"]}, (5, 2)),
        ('say "[,{"', (0, 0)),
    ],
)
def test_values_are_counted_outside_of_strings(value: Any, counts: tuple[int, int]) -> None:
    assert _count(json.dumps(value).encode()) == counts


def test_a_body_of_many_parts_is_refused_and_one_of_much_text_is_not() -> None:
    check_shape(json.dumps({"a": "[{," * MOST_VALUES}).encode(), 0)
    check_shape(b"[" + b",".join([b"1"] * MOST_VALUES) + b"]", 0)
    check_shape(b"[" + b",".join([b"1"] * (MOST_VALUES + 11)) + b"]", 10)
    check_shape(b"[" * SMALL_BYTES, 0)
    bodies = (b"[" + b",".join([b"1"] * (MOST_VALUES + 2)) + b"]", b"[" + b",".join([b"{}"] * MOST_CONTAINERS) + b"]")
    for body in bodies:
        with pytest.raises(ApiError) as error:
            check_shape(body, 0)
        assert error.value.status == 413 and str(MOST_VALUES) in error.value.message


async def test_a_text_that_cannot_fit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ScriptedRunner()
    read: list[str] = []
    encode, render = type(runner.tokenizer).encode, type(runner.tokenizer).encode_parts
    monkeypatch.setattr(type(runner.tokenizer), "encode", lambda *args, **kw: read.append("") or encode(*args, **kw))
    monkeypatch.setattr(type(runner.tokenizer), "encode_parts", lambda *args: read.append("") or render(*args))
    longest = max(map(len, (runner.tokenizer.id_to_bytes(token) for token in range(runner.config.vocab_size))))
    text = "x" * (4096 * longest + 1)
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"model": "", "max_tokens": 5, "messages": [{"role": "user", "content": text}]},
    }
    with running_server(runner) as server:
        read.clear()
        for path, body in bodies.items():
            status, answer = await post(server, path, body)
            assert status == 400 and "context holds (4096 tokens)" in answer["error"]["message"], (path, answer)
        assert not read
        assert (await post(server, "/v1/chat/completions", {"messages": MESSAGES}))[0] == 200
        assert read
        counted = await post(
            server, "/v1/messages/count_tokens", {"model": "", "messages": bodies["/v1/messages"]["messages"]}
        )
        assert counted[0] == 200 and counted[1]["input_tokens"] > len(text)


async def test_earlier_turns_count_for_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small body may go on from a long conversation."""
    runner = ScriptedRunner(max_context_tokens=100_000)
    with running_server(runner) as server:
        first = await post(server, "/v1/responses", {"input": "x" * (10 * SHORT)})
        threads: list[str] = []
        render = server.service.render
        monkeypatch.setattr(
            server.service, "render", lambda *args: threads.append(threading.current_thread().name) or render(*args)
        )
        await post(server, "/v1/responses", {"input": "go on", "previous_response_id": first[1]["id"]})
        await post(server, "/v1/responses", {"input": "short"})
    assert [name.startswith("resin-aside") for name in threads] == [True, False]


@pytest.mark.parametrize("recipe", ["qwen3", "llama3", "gpt_oss", "lfm2", "gemma"])
def test_the_server_is_warm_before_it_listens(recipe: str) -> None:
    """The first requests do not build what holds the interpreter for a second."""
    with running_server(ScriptedRunner(), recipe=recipe) as server:
        compiler = server.service._compiler
        assert compiler is not None
        vocabulary = compiler._vocabulary
        assert vocabulary is not None
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        for wanted in ({"response_format": schema}, {} if recipe == "gemma" else tools):  # which has no words for tools
            body = {"messages": MESSAGES, "max_tokens": 20} | wanted
            status, answer = asyncio.run(post(server, "/v1/chat/completions", body))
            assert status == 200, answer
            assert compiler._vocabulary is vocabulary
