"""`/v1/completions`: raw prompts, as text or token ids, with echo and prompt logprobs for evaluation tools."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from aiohttp import web

from serve.aside import SHORT
from serve.endpoints.chat import FINISH_REASONS
from serve.errors import ApiError, invalid, openai_body
from serve.generation import Generation, PlainParser, Update
from serve.logprobs import completion_logprobs
from serve.replies import answer_length, json_answer, read_body, usage_of
from serve.schemas.completions import CompletionRequest
from serve.schemas.sampling import build_params, seed_of_choice
from serve.service import Plan, Service, length_of, service_of
from serve.session import Choice, Session
from serve.sse import EventStream, encode_events
from serve.text_rows import TextRows, TokenLogprob

MAX_PROMPTS = 256


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Continues raw prompts, streaming or not."""
    service = service_of(request)
    body = await read_body(request, CompletionRequest)
    service.check_model(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"best_of={body.best_of}: expected the same as n")
    plans = await service.aside.run(length_of(request), _plan_choices, service, body)
    reply = _Reply(service, body)
    with service.run(request, plans, cache_salt=body.cache_salt or "") as session:
        session.prompt_tokens = sum(len(plan.prompt_ids) for plan in plans[:: body.n or 1])
        if body.stream:
            return await _stream(request, session, reply)
        return await json_answer(request, session, lambda updates: reply.whole(session, updates))


def _plan_choices(service: Service, body: CompletionRequest) -> list[Plan]:
    prompts = body.prompts()
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    count = service.choices(body.n)
    plans = []
    for prompt in prompts:
        prompt_ids = prompt if isinstance(prompt, list) else service.encode_prompt(prompt)
        if not prompt_ids:
            raise invalid("prompt", "prompt: at least one token")
        # 16 is the API's own default; 0 asks for nothing but the prompt's logprobs, which takes one step all the same.
        asked = 16 if body.max_tokens is None else max(1, body.max_tokens)
        params = build_params(
            body,
            defaults=service.sampling,
            max_output_tokens=service.output_tokens(asked, len(prompt_ids), "prompt"),
            stop_token_ids=tuple(service.tokenizer.eos_ids),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for index in range(count):
            seeded = dataclasses.replace(params, seed=seed_of_choice(params.seed, index))
            generation = Generation(
                PlainParser(service.tokenizer),
                stops=body.stop_strings(),
                text_rows=None if body.logprobs is None else TextRows(service.tokenizer),
                is_empty=body.max_tokens == 0,
            )
            plans.append(Plan(prompt_ids, seeded, generation))
    return plans


class _Reply:
    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = service.model
        self.tokenizer = service.tokenizer
        self.echoes = bool(body.echo)
        self.wants_logprobs = body.logprobs is not None
        self.prompts = len(body.prompts())
        self.includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._offsets: dict[int, int] = {}

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def choice(self, choice: Choice, update: Update, *, is_first: bool) -> dict[str, Any]:
        """One choice's part of an answer or of a streamed chunk."""
        text = update.text
        echoed = self.echoes and is_first
        prompt = self.tokenizer.decode(_prompt_ids(choice)) if echoed else ""
        start = self._offsets.get(choice.index, 0)
        self._offsets[choice.index] = start + len(prompt) + len(text)
        return {
            "index": choice.index,
            "text": prompt + text,
            "logprobs": self._logprobs(choice, update.text_logprobs, echoed, start) if self.wants_logprobs else None,
            "finish_reason": None if update.ending is None else FINISH_REASONS[update.ending],
        }

    def _logprobs(self, choice: Choice, entries: list[TokenLogprob], echoed: bool, start: int) -> dict[str, Any]:
        ids = [entry.token_id for entry in entries]
        logprobs: list[float | None] = [entry.logprob for entry in entries]
        tops: Iterable[Any] = (entry.top for entry in entries)
        request = choice.job.request if choice.job else None
        found = request.prompt_logprobs if echoed and request else None
        if found is not None:
            # Nothing comes before the first token, so it has no logprob.
            ids = _prompt_ids(choice) + ids
            logprobs = [None, *found.logprobs.tolist(), *logprobs]
            pairs = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
            tops = chain([None], (zip(*pair, strict=True) for pair in pairs), tops)
        return completion_logprobs(ids, logprobs, tops, self.tokenizer, first_offset=start)

    def whole(self, session: Session, updates: Sequence[Update]) -> dict[str, Any]:
        choices = [self.choice(choice, updates[choice.index], is_first=True) for choice in session.choices]
        return self.body(choices) | {"usage": usage_of(session, self.prompts)}


def _prompt_ids(choice: Choice) -> list[int]:
    assert choice.job is not None
    return list(choice.job.prompt_ids)


async def _stream(request: web.Request, session: Session, reply: _Reply) -> web.StreamResponse:
    stream = EventStream(request, session)
    started: set[int] = set()

    def encode(choice: Choice, update: Update) -> bytes:
        chunk = reply.body([reply.choice(choice, update, is_first=choice.index not in started)])
        started.add(choice.index)
        return encode_events([chunk | ({"usage": None} if reply.includes_usage else {})])

    def is_long(choice: Choice) -> bool:
        return reply.echoes and choice.index not in started and answer_length(choice) > SHORT

    try:
        await stream.forward(encode, is_long)
        if reply.includes_usage:
            await stream.send(encode_events([reply.body([]) | {"usage": usage_of(session, reply.prompts)}]))
    except ApiError as error:
        if not stream.has_started:
            raise
        await stream.send(encode_events([openai_body(error)]))
    return await stream.close(b"data: [DONE]\n\n")
