"""Offline generation: requests of a file through one engine, as many at once as it holds."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, Any

import msgspec

from resin import FinishedEvent, InvalidRequest, Request, TokensEvent
from resin.plan.sampling import TokenMask
from resin.recipes import Goal, Parser, ReasoningDelta, Recipe, TextDelta, ToolCallDelta
from serve.errors import ApiError, failed, from_invalid_request, openai_body
from serve.generation import Ending, Generation, PlainParser, Update
from serve.loaded_model import LoadedModel
from serve.planning import goal_of, reasoning_options, tool_use_of
from serve.schemas.body import decode_body
from serve.schemas.chat import to_messages
from serve.schemas.offline import OfflineRequest
from serve.schemas.sampling import NAMES, build_params
from serve.structured import GrammarCompiler, is_bound, write_grammar

_FINISH_REASONS = {Ending.STOP_STRING: "stop"}


@dataclass(frozen=True, slots=True)
class Done:
    """What an earlier run has written already."""

    ids: frozenset[str | int] = frozenset()
    lines: frozenset[int] = frozenset()  # of inputs that had no id to go by


def read_done(output: Path) -> Done:
    """The results in a file; a last line that was cut short is removed from it. A pipe keeps none."""
    if not output.is_file():
        return Done()
    ids: set[str | int] = set()
    lines: set[int] = set()
    whole_bytes = 0
    with output.open("rb") as file:
        for line in file:
            try:
                result = msgspec.json.decode(line) if line.endswith(b"\n") else None
            except msgspec.DecodeError:
                result = None
            if not isinstance(result, dict):
                break
            whole_bytes += len(line)
            if isinstance(result.get("id"), str | int):
                ids.add(result["id"])
            else:
                lines.add(result.get("line", 0))
    if whole_bytes < output.stat().st_size:
        with output.open("rb+") as file:
            file.truncate(whole_bytes)
    return Done(frozenset(ids), frozenset(lines))


class InputLines:
    """The numbered lines of a file that are not blank.

    Those of a pipe (`is_live`) are read by a thread, so that requests go on while the next line is on its way.
    """

    READ_AHEAD = 64

    def __init__(self, file: IO[bytes], *, is_live: bool) -> None:
        self.is_exhausted = False
        self._lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        self._arrived: queue.Queue[tuple[int, bytes] | Exception | None] | None = None
        if is_live:
            self._arrived = queue.Queue(self.READ_AHEAD)
            threading.Thread(target=self._read, args=(self._arrived,), daemon=True).start()

    def take(self, *, wait: bool) -> tuple[int, bytes] | None:
        """The next line; None at the end, and without `wait` also while there is none yet."""
        if self._arrived is None:
            entry = next(self._lines, None)
        else:
            try:
                arrived = self._arrived.get(block=wait)
            except queue.Empty:
                return None
            if isinstance(arrived, Exception):
                raise arrived
            entry = arrived
        self.is_exhausted = entry is None
        return entry

    def _read(self, arrived: queue.Queue[tuple[int, bytes] | Exception | None]) -> None:
        try:
            for entry in self._lines:
                arrived.put(entry)
            arrived.put(None)
        except Exception as error:  # it is the taker's
            arrived.put(error)


@dataclass(slots=True)
class _Running:
    id: str | int
    request: Request
    generation: Generation
    update: Update = field(default_factory=Update)


class OfflineRun:
    """Reads requests as the engine has room for them and hands results out as they come."""

    def __init__(self, loaded: LoadedModel, *, default_max_tokens: int, at_once: int) -> None:
        self._loaded = loaded
        self._engine = loaded.engine
        self._default_max_tokens = default_max_tokens
        self._at_once = at_once
        self._running: dict[int, _Running] = {}
        self._compiler: GrammarCompiler | None = None

    def run(self, lines: InputLines, done: Done, write: Callable[[dict[str, Any]], None]) -> None:
        """Generates for every line that is not done, and calls `write` with each result.

        Args:
            lines: the requests, JSON.
            done: what to leave out.
            write: gets results in the order in which they are complete.

        Raises:
            EngineFailed: the engine broke; what was written stays good.
        """
        seen: set[str | int] = set()
        while not lines.is_exhausted or self._running:
            while len(self._running) < self._at_once and (entry := self._next(lines)) is not None:
                if (error := self._admit(*entry, done, seen)) is not None:
                    write(error)
            if self._running:
                self._step(write)

    def _next(self, lines: InputLines) -> tuple[int, bytes] | None:
        return None if lines.is_exhausted else lines.take(wait=not self._running)

    def _admit(self, number: int, line: bytes, done: Done, seen: set[str | int]) -> dict[str, Any] | None:
        """Submits a line; returns its result at once if it is at fault."""
        request_id: str | int | None = None
        try:
            request_id = _id_of(line)
            if request_id in done.ids or (request_id is None and number in done.lines):
                return None
            body = decode_body(line, OfflineRequest)
            if body.id in seen:
                raise ApiError(400, f"id={body.id!r}: an earlier line has it", param="id")
            seen.add(body.id)
            self._submit(body)
        except InvalidRequest as error:
            return _error_result(request_id, number, from_invalid_request(error, NAMES))
        except ApiError as error:
            return _error_result(request_id, number, error)
        return None

    def _submit(self, body: OfflineRequest) -> None:
        body.check()
        loaded = self._loaded
        allowed_tokens = None
        if body.messages is None:
            prompt_ids = body.prompt_ids or loaded.tokenizer.encode(body.prompt or "", add_special=True)
            stops = loaded.stop_token_ids
            parser: Parser = PlainParser(loaded.tokenizer)
        else:
            if loaded.recipe is None:
                raise ApiError(400, "messages: this model has no conversation format", param="messages")
            use = tool_use_of(body)
            options: dict[str, Any] = {"current_date": date.today().isoformat()}
            options |= reasoning_options(body.reasoning_effort, body.chat_template_kwargs)
            prompt_ids = loaded.recipe.render(to_messages(body.messages), use.tools, **options)
            stops = loaded.recipe.stop_token_ids
            parser = loaded.recipe.create_parser(prompt_ids, tools=use.tools)
            allowed_tokens = self._mask(loaded.recipe, *goal_of(use, body.schema()), prompt_ids)
        params = build_params(
            body,
            defaults=loaded.sampling,
            max_output_tokens=body.max_completion_tokens or body.max_tokens or self._default_max_tokens,
            stop_token_ids=stops,
            logprobs=body.top_logprobs,
            allowed_tokens=allowed_tokens,
        )
        generation = Generation(parser, stops=body.stop_strings(), wants_logprobs=body.top_logprobs is not None)
        request = self._engine.submit(prompt_ids, sampling_params=params)
        generation.on_stop = lambda: self._engine.cancel(request)
        self._running[request.id] = _Running(body.id, request, generation)

    def _mask(self, recipe: Recipe, goal: Goal | None, param: str, prompt_ids: Sequence[int]) -> TokenMask | None:
        if goal is None or not is_bound(recipe, goal):
            return None
        grammar = write_grammar(recipe, goal, prompt_ids, param)
        if self._compiler is None:
            vocab_size = self._engine.config.vocab_size
            self._compiler = GrammarCompiler(self._loaded.tokenizer, vocab_size, recipe.stop_token_ids)
        return self._compiler.compile(grammar, 1, param)[0]

    def _step(self, write: Callable[[dict[str, Any]], None]) -> None:
        for event in self._engine.step():
            if isinstance(event, TokensEvent):
                token_ids, bounds = event.token_ids.tolist(), event.token_indptr.tolist()
                for index, request in enumerate(event.requests):
                    running = self._running.get(request.id)
                    if running is not None:
                        begin = bounds[index]
                        running.generation.add_tokens(token_ids[begin : bounds[index + 1]], event, begin)
                        self._read(running)
            elif isinstance(event, FinishedEvent) and (running := self._running.pop(event.request.id, None)):
                running.generation.finish(event.reason, event.request.error)
                self._read(running)
                write(self._result(running))

    def _read(self, running: _Running) -> None:
        if running.generation.ending is None:
            running.update.extend(running.generation.take_update())

    def _result(self, running: _Running) -> dict[str, Any]:
        update, request = running.update, running.request
        assert update.ending is not None
        if update.ending is Ending.ERROR:
            cause = request.error
            if isinstance(cause, InvalidRequest):
                return {"id": running.id} | openai_body(from_invalid_request(cause, NAMES))
            return {"id": running.id} | openai_body(failed(f"the request failed: {cause}"))
        tool_calls = [
            {"name": delta.name, "arguments": delta.arguments}
            for delta in update.deltas
            if isinstance(delta, ToolCallDelta)
        ]
        reasoning = "".join(delta.text for delta in update.deltas if isinstance(delta, ReasoningDelta))
        result: dict[str, Any] = {
            "id": running.id,
            "token_ids": update.token_ids,
            "text": "".join(delta.text for delta in update.deltas if isinstance(delta, TextDelta)),
            "finish_reason": _FINISH_REASONS.get(update.ending, update.ending.value),
            "logprobs": _logprobs(update) if request.params.logprobs is not None else None,
            "usage": {
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(update.token_ids),
                "total_tokens": len(request.prompt_ids) + len(update.token_ids),
            },
        }
        if reasoning:
            result["reasoning"] = reasoning
        if tool_calls:
            result["tool_calls"] = tool_calls
        return result


def _logprobs(update: Update) -> list[dict[str, Any]]:
    """One entry a token: its own logprob, and the most likely ids with theirs."""
    return [
        {
            "token_id": entry.token_id,
            "logprob": entry.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in entry.top],
        }
        for entry in update.logprobs
    ]


def _id_of(line: bytes) -> str | int | None:
    """The id of a line that may be faulty otherwise."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) or (isinstance(found, int) and not isinstance(found, bool)) else None


def _error_result(request_id: str | int | None, number: int, error: ApiError) -> dict[str, Any]:
    """The result of a bad line; the line number stands in for an id that it lacks."""
    return {"id": request_id, "line": number} | openai_body(error)
