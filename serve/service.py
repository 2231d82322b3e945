"""What every handler works with: the engine behind its actor, the recipe, the limits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from aiohttp import web

from resin import Engine, InvalidRequest, SamplingParams
from resin.models.sampling_defaults import SamplingDefaults
from resin.plan.sampling import TokenMask
from resin.recipes import Goal, Message, Recipe, Role, Text, Tokenizer, Tool
from serve.actor import EngineActor, Job, NotAccepting, QueueFull
from serve.aside import SHORT, Aside
from serve.config import ServerConfig
from serve.errors import ApiError, from_invalid_request, invalid, overloaded, unavailable
from serve.generation import Generation
from serve.http_metrics import HttpMetrics
from serve.length import has_room, longest_token_bytes
from serve.response_store import ResponseStore
from serve.session import Session
from serve.structured import GrammarCompiler, write_grammar

MOST_COUNTED_TOKENS = 1 << 19
"""What `/tokenize` and `count_tokens` take where the context is shorter."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice to generate: its prompt, its policy, and what reads its tokens."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    generation: Generation


class Service:
    """The shared state of one server; lives on the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        actor: EngineActor,
        *,
        model: str,
        recipe: Recipe | None,
        tokenizer: Tokenizer | None,
        sampling: SamplingDefaults,
        config: ServerConfig,
        metrics: HttpMetrics,
    ) -> None:
        self.engine = engine
        self.actor = actor
        self.model = model
        self.recipe = recipe
        self.sampling = sampling
        self.config = config
        self.metrics = metrics
        self.created_s = int(time.time())
        self.is_draining = False
        self.responses = ResponseStore(config.stored_responses, config.stored_response_bytes)
        self._tokenizer = tokenizer
        self.aside = Aside(
            capacity=config.request_queue_capacity,
            timeout_s=config.request_timeout_s,
            retry_after_s=config.retry_after_s,
        )
        self._compiler: GrammarCompiler | None = None
        self._longest_token = 0  # bytes

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if the server was given none."""
        if self._tokenizer is None:
            raise ApiError(501, "this server has no tokenizer", kind="server_error", code="no_tokenizer")
        return self._tokenizer

    @cached_property
    def can_switch_thinking(self) -> bool:
        """Whether `enable_thinking` makes a difference to this model's prompts."""
        if self.recipe is None:
            return False
        question = [Message(Role.USER, [Text("?")])]
        with contextlib.suppress(InvalidRequest):
            with_, without = (self.recipe.render(question, enable_thinking=thinks) for thinks in (True, False))
            return list(with_) != list(without)
        return False

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here; no name means the one that is."""
        if name not in ("", self.model):
            message = f"the model {name!r} does not exist; this server has {self.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def warm_up(self) -> None:
        """What the first requests would wait for, and with them everybody: much of it holds the interpreter."""
        if self._tokenizer is None:
            return
        self._longest_token = longest_token_bytes(self._tokenizer, self.engine.config.vocab_size)
        self._tokenizer.encode("a" * (SHORT + 1))
        if self.recipe is None:
            return
        with contextlib.suppress(ApiError):
            self.render([Message(Role.USER, [Text("?")])], [], {})
        if not self.recipe.stop_token_ids:
            return
        self._compiler = GrammarCompiler(self._tokenizer, self.engine.config.vocab_size, self.recipe.stop_token_ids)
        for goal in (Goal(schema={"type": "object"}), Goal(tools=(Tool("f"),), allows_text=True)):
            with contextlib.suppress(ApiError):
                self.masks(goal, (), 1, "")

    def check_length(self, texts: Sequence[str], param: str, *, room_tokens: int | None = None) -> None:
        """Raises ApiError for texts that have no room in the context, or for more than `room_tokens`, unread."""
        room = room_tokens or self.engine.context_length
        if self._tokenizer is not None and not has_room(texts, self._tokenizer, room, self._longest_token):
            what = "this server counts" if room_tokens else "this model's context holds"
            message = f"the prompt has {sum(map(len, texts))} characters, which is more than {what} ({room} tokens)"
            raise invalid(param, message, code="context_length_exceeded")

    def check_countable(self, texts: Sequence[str], param: str) -> None:
        """Raises ApiError for texts that are too long even to be counted."""
        self.check_length(texts, param, room_tokens=max(self.engine.context_length, MOST_COUNTED_TOKENS))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: dict[str, Any]) -> list[int]:
        """The prompt of a conversation.

        Raises:
            ApiError: 400 if the model's format cannot say it, 501 if the server has no recipe.
        """
        if self.recipe is None:
            raise ApiError(501, "this model has no chat format", kind="server_error", code="no_recipe")
        try:
            return self.recipe.render(messages, tools, **options)
        except InvalidRequest as error:
            raise from_invalid_request(error) from error

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt to be continued; control tokens that it spells count as such."""
        self.check_length([text], "prompt")
        return self.tokenizer.encode(text, add_special=True)

    def masks(self, goal: Goal | None, prompt_ids: Sequence[int], count: int, param: str) -> Sequence[TokenMask | None]:
        """The token masks of `count` choices that must reach a goal; no masks without one.

        Raises:
            ApiError: 400 naming `param` if the goal cannot be put into a grammar.
        """
        if goal is None:
            return [None] * count
        try:
            grammar = write_grammar(self.recipe, goal, prompt_ids, param)
        except InvalidRequest as error:
            raise from_invalid_request(error) from error
        if self._compiler is None:
            raise invalid(param, "no token ends this model's answers, so that none can be held to a grammar")
        return self._compiler.compile(grammar, count, param)

    def choices(self, count: int | None) -> int:
        """How many choices a request gets; raises ApiError beyond the limit."""
        if count is not None and count > self.config.max_choices:
            raise invalid("n", f"n={count}: this server allows at most {self.config.max_choices}")
        return count or 1

    def output_tokens(self, asked: int | None, prompt_tokens: int, param: str) -> int:
        """How many tokens a request may generate.

        Raises:
            ApiError: the prompt fills the context, or the request asks for more than the server allows.
        """
        room = self.engine.context_length - prompt_tokens
        if room <= 0:
            raise invalid(
                "messages" if param != "prompt" else param,
                f"the prompt has {prompt_tokens} tokens; this model's context holds {self.engine.context_length}, "
                "the answer included",
                code="context_length_exceeded",
            )
        limit = self.config.max_output_tokens
        if asked is None:
            return min(room, limit or room)
        if limit is not None and asked > limit:
            raise invalid(param, f"{param}={asked}: this server allows at most {limit}")
        return min(asked, room)

    @contextlib.contextmanager
    def run(self, http_request: web.Request, plans: Sequence[Plan], *, cache_salt: str = "") -> Iterator[Session]:
        """Queues the choices of a request and cancels what still runs when the handler leaves.

        Raises:
            ApiError: 429 if the queue is full, 503 if the server is stopping.
        """
        config = self.config
        if len(plans) > config.request_queue_capacity:
            message = f"{len(plans)} choices; this server's queue holds {config.request_queue_capacity}"
            raise invalid("n", f"n: the request asks for {message}")

        def on_slow() -> None:
            self.metrics.slow_clients.inc()
            if http_request.transport is not None:
                http_request.transport.abort()

        session = Session(
            stream_interval=config.stream_interval,
            buffer_events=config.client_buffer_events,
            timeout_s=config.request_timeout_s,
            on_slow=on_slow,
        )
        jobs: list[Job] = []
        for plan in plans:
            choice = session.add_choice(plan.generation)
            job = session.job_for(choice, plan.prompt_ids, plan.params, cache_salt, http_request.get(REPLICA))
            plan.generation.on_stop = lambda job=job: self.actor.cancel(job)  # type: ignore[misc]
            jobs.append(job)
        try:
            self.actor.submit(jobs)
        except QueueFull:
            raise overloaded(config.retry_after_s) from None
        except NotAccepting:
            raise unavailable("the server is shutting down") from None
        try:
            yield session
        finally:
            for job in jobs:
                if not job.is_done:
                    self.actor.cancel(job)


BODY_BYTES = web.RequestKey("body_bytes", int)
REPLICA: web.RequestKey[int | None] = web.RequestKey("replica", object)  # type: ignore[arg-type]


def length_of(request: web.Request) -> int:
    """Bytes of the body, once it has been read: how long whatever follows from it may take."""
    return request.get(BODY_BYTES, 0)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """The service that a request arrived at."""
    return request.app[SERVICE]
