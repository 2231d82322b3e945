"""A client's request while it runs: its choices, and the wait for something new in them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

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

    def on_tokens(self, token_ids: list[int], event: TokensEvent, begin: int) -> bool:
        self.generation.add_tokens(token_ids, event, begin)
        return self.session.on_news(self)

    def on_finish(self, reason: FinishReason, error: BaseException | None) -> bool:
        self.generation.finish(reason, error)
        return self.session.on_news(self)

    def flush(self) -> None:
        self.session.flush(self)


Take = Callable[[Choice, Update], bool | None]


class Session:
    """All choices of one request on their way to the handler that answers it."""

    def __init__(
        self, *, stream_interval: int, buffer_events: int, timeout_s: float, on_slow: Callable[[], None]
    ) -> None:
        """`on_slow` is called once, when more than `buffer_events` steps wait for a socket that does not drain."""
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._timeout_s = timeout_s
        self._expires_at_s = asyncio.get_running_loop().time() + timeout_s
        self._stream_interval = stream_interval
        self._buffer_events = buffer_events
        self._running = 0  # choices whose ending has not been handed out
        self._take: Take | None = None
        self._handler: asyncio.Future[None] | None = None  # done when the handler has something to do
        self._on_slow = on_slow
        self.is_too_slow = False
        self._is_sending = False
        self._waiting_steps = 0

    def add_choice(self, generation: Generation) -> Choice:
        choice = Choice(self, len(self.choices), generation)
        self.choices.append(choice)
        self._running += 1
        return choice

    def job_for(
        self,
        choice: Choice,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str,
        replica: int | None = None,
    ) -> Job:
        """The engine job whose tokens the choice receives."""
        self.prompt_tokens = len(prompt_ids)
        choice.job = Job(prompt_ids, params, choice, cache_salt, replica=replica)
        return choice.job

    def on_news(self, choice: Choice) -> bool:
        """Called for every step that concerns a choice; True if it can hand something out."""
        if self._is_sending:
            self._waiting_steps += 1
            if self._waiting_steps > self._buffer_events * len(self.choices) and not self.is_too_slow:
                self.is_too_slow = True
                self._on_slow()
        return self._take is not None and choice.generation.has_news(self._stream_interval)

    async def deliver(self, take: Take, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Hands out everything new, as it comes, until all choices have ended.

        Args:
            take: gets each update, outside of the handler's own task; it must not wait. True says that it can take no
                more for now.
            drain: waits until it can; tokens gather meanwhile.

        Raises:
            ApiError: the engine did not take the request, failed, stopped, or ran out of time.
        """
        try:
            # On the loop, so that time runs out whatever the engine does.
            async with asyncio.timeout_at(self._expires_at_s):
                await self._deliver(take, drain)
        except TimeoutError:
            raise timed_out(self._timeout_s) from None

    async def _deliver(self, take: Take, drain: Callable[[], Awaitable[None]] | None) -> None:
        while self._running:
            self._take = take
            self._handler = asyncio.get_running_loop().create_future()
            for choice in self.choices:
                self.flush(choice)
            try:
                await self._handler
            finally:
                self._take = None
            if drain is not None:
                await drain()

    async def collect(self) -> list[Update]:
        """The whole of every choice, once all have ended; raises as `deliver` does."""
        whole = [Update() for _ in self.choices]
        await self.deliver(lambda choice, update: whole[choice.index].extend(update))
        return whole

    def flush(self, choice: Choice) -> None:
        """Hands out what is new in a choice, if somebody takes it now."""
        if self._take is None or not choice.generation.has_news(self._stream_interval):
            return
        try:
            update = choice.generation.take_update()
            if update.ending is not None:
                self._running -= 1
                self._check_ending(choice, update.ending)
            if self._take(choice, update) or not self._running:
                self._return_to_handler()
        except Exception as error:  # it is the handler's
            self._return_to_handler(error)

    def _return_to_handler(self, error: Exception | None = None) -> None:
        self._take = None
        assert self._handler is not None
        if self._handler.done():  # cancelled: the client has left
            return
        if error is None:
            self._handler.set_result(None)
        else:
            self._handler.set_exception(error)

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
        if ending is Ending.CANCELLED:
            raise unavailable("the server is shutting down")
        if ending is Ending.ERROR:
            raise _as_api_error(choice.generation.error)


def _as_api_error(error: BaseException | None) -> ApiError:
    if isinstance(error, InvalidRequest):
        return from_invalid_request(error, NAMES)
    return failed("the request failed inside the engine")
