"""A client's request while it runs: its choices, and the wait for something new in them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from resin import FinishReason, SamplingParams
from resin.events import TokensEvent
from resin.plan import InvalidRequest
from serve.actor import Job
from serve.errors import ApiError, failed, from_invalid_request, timed_out, unavailable
from serve.generation import Ending, Generation, Update
from serve.schemas.sampling import NAMES


class Choice:
    """One choice of a session: the receiver of one engine job."""

    def __init__(self, session: Session, index: int, generation: Generation) -> None:
        self.session = session
        self.index = index
        self.generation = generation
        self.job: Job | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        request = self.job.request if self.job else None
        return request.prefix_hit_tokens if request else 0

    def on_tokens(self, token_ids: list[int], event: TokensEvent, begin: int) -> None:
        self.generation.add_tokens(token_ids, event, begin)
        self.session.on_news(self, is_last=False)

    def on_finish(self, reason: FinishReason, error: BaseException | None) -> None:
        self.generation.finish(reason, error)
        self.session.on_news(self, is_last=True)


class Session:
    """All choices of one request, and one waiter: the handler that answers it."""

    def __init__(
        self, *, stream_interval: int, buffer_events: int, timeout_s: float, on_slow: Callable[[], None]
    ) -> None:
        """`on_slow` is called once, when more than `buffer_events` steps wait for a socket that does not drain."""
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self.started_s = time.monotonic()
        self.timeout_s = timeout_s
        self._stream_interval = stream_interval
        self._buffer_events = buffer_events
        self._dirty: dict[int, Choice] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._on_slow = on_slow
        self.is_too_slow = False
        self._is_sending = False
        self._waiting_steps = 0

    def add_choice(self, generation: Generation) -> Choice:
        choice = Choice(self, len(self.choices), generation)
        self.choices.append(choice)
        return choice

    def job_for(self, choice: Choice, prompt_ids: Sequence[int], params: SamplingParams, cache_salt: str) -> Job:
        """The engine job whose tokens the choice receives."""
        self.prompt_tokens = len(prompt_ids)
        choice.job = Job(prompt_ids, params, choice, self.started_s + self.timeout_s, cache_salt)
        return choice.job

    def on_news(self, choice: Choice, *, is_last: bool) -> None:
        """Called on the loop's thread for every step that concerns a choice."""
        if self._is_sending:
            self._waiting_steps += 1
            if self._waiting_steps > self._buffer_events * len(self.choices) and not self.is_too_slow:
                self.is_too_slow = True
                self._on_slow()
        if choice.index not in self._dirty:
            generation = choice.generation
            waits = generation.pending_tokens < self._stream_interval and generation.completion_tokens
            if waits and not is_last:
                return
            self._dirty[choice.index] = choice
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def updates(self) -> AsyncIterator[tuple[Choice, Update]]:
        """New things in any choice, until all have ended.

        Raises:
            ApiError: the engine did not take the request, failed, stopped, or ran out of time.
        """
        running = len(self.choices)
        while running:
            if not self._dirty:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            dirty, self._dirty = self._dirty, {}
            for choice in dirty.values():
                if choice.generation.ending is not None:
                    continue
                update = choice.generation.take_update()
                if update.ending is not None:
                    running -= 1
                    self._check_ending(choice, update.ending)
                yield choice, update

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Around each write to the client's socket: steps that go by meanwhile are counted against it."""
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False
            self._waiting_steps = 0

    def _check_ending(self, choice: Choice, ending: Ending) -> None:
        if ending is Ending.DEADLINE:
            raise timed_out(self.timeout_s)
        if ending is Ending.CANCELLED:
            raise unavailable("the server is shutting down")
        if ending is Ending.ERROR:
            raise _as_api_error(choice.generation.error)


def _as_api_error(error: BaseException | None) -> ApiError:
    if isinstance(error, InvalidRequest):
        return from_invalid_request(error, NAMES)
    return failed("the request failed inside the engine")
