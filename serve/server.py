"""HttpServer: one engine behind HTTP, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from resin import Engine, EngineFailed, InvalidRequest
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import Recipe, Tokenizer
from serve.actor import EngineActor
from serve.app import build_app
from serve.config import ServerConfig
from serve.delivery import Delivery
from serve.http_metrics import HttpMetrics
from serve.listener import Listener
from serve.origins import is_loopback
from serve.service import Service
from serve.watch import Watch

_LOG = logging.getLogger("resin.serve")
_HTTP_LOG = logging.getLogger("resin.http")

STOP_LIMIT_S = 10.0
"""How long the step that runs when all is over may take; the engine is left behind then."""

FAILED_LIMIT_S = 1.0
"""The same once it is known that the engine has failed."""


class EngineHangs(EngineFailed):
    """The engine's thread is still inside a step: nothing can be cleaned up behind it."""


def _shorten(record: logging.LogRecord) -> bool:
    """What is wrong with a client's bytes is one line, and no traceback of this process."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        reason = [*str(error).splitlines(), type(error).__name__]
        record.msg, record.args, record.exc_info = "malformed request: %s", (" ".join(reason),), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


_HTTP_LOG.addFilter(_shorten)


class HttpServer:
    """Serves an engine until it is told to stop.

    The engine is handed over: from `serve` on, a thread of the server's own is the only one that touches it. Warm it up
    before: the socket opens at once.

    Args:
        engine: the engine.
        recipe: the model's conversation format; without one there are no chat endpoints.
        model: the name that clients ask for.
        tokenizer: for raw prompts and logprobs; None takes the runner's own, if it has one.
        sampling: how to sample where a request does not say; None takes Resin's own defaults.
        request_queue_capacity: see ServerConfig.
        stream_interval: see ServerConfig.
        config: everything else; the two arguments above override it.
        listener: the sockets; None binds those of the config when it serves.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        recipe: Recipe | None = None,
        tokenizer: Tokenizer | None = None,
        sampling: SamplingDefaults | None = None,
        request_queue_capacity: int | None = None,
        stream_interval: int | None = None,
        config: ServerConfig | None = None,
        listener: Listener | None = None,
    ) -> None:
        config = config or ServerConfig()
        self.config = dataclasses.replace(
            config,
            request_queue_capacity=request_queue_capacity or config.request_queue_capacity,
            stream_interval=stream_interval or config.stream_interval,
        )
        self.model = model
        self.port = self.config.port
        self._listener = listener
        self._engine = engine
        self._recipe = recipe
        self._tokenizer = tokenizer if tokenizer is not None else engine.parts.tokenizer
        self._sampling = sampling or SamplingDefaults()
        self._ready = threading.Event()
        self._finished = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stops_early = False
        self._failure: BaseException | None = None
        self._service: Service | None = None
        self._runner: web.AppRunner | None = None
        self.app: web.Application | None = None  # the running server's application

    @property
    def url(self) -> str:
        """Base address, with the real port once the server is ready."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    @property
    def service(self) -> Service:
        """The running server's state, to look at."""
        assert self._service is not None, "the server is not running"
        return self._service

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    def serve(self, on_ready: Callable[[], None] | None = None) -> None:
        """Runs the server in this thread until `shutdown`, SIGTERM or SIGINT (in the main thread), or a failure.

        Args:
            on_ready: called once the socket accepts connections.

        Raises:
            EngineFailed: the engine broke; the listener is closed and every client has been told.
            InvalidRequest: the address cannot be listened on.
        """
        try:
            asyncio.run(self._serve(on_ready))
        finally:
            self._finished.set()
            self._ready.set()
        if self._failure is not None:
            kind = type(self._failure) if isinstance(self._failure, EngineHangs) else EngineFailed
            raise kind(f"the server stopped: {self._failure}") from self._failure

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Waits until the socket accepts connections; False if it does not (or no longer) do so."""
        return self._ready.wait(timeout_s) and not self._finished.is_set()

    def shutdown(self, *, wait: bool = True) -> None:
        """Stops taking requests, lets running ones finish for `drain_timeout_s`, then ends. From any thread."""
        self._stops_early = True
        if self._loop is not None and not self._finished.is_set():
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                self._loop.call_soon_threadsafe(self._request_stop)
            if wait:
                self._finished.wait()

    def fail(self, error: BaseException) -> None:
        """Ends as if the engine had failed: no step will run any more. From any thread; the first error counts."""
        if self._failure is None:
            self._failure = error
        self._stops_early = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop closed, without waiting for the step that failed
                self._loop.call_soon_threadsafe(self._request_stop)

    def _request_stop(self) -> None:
        if self._stop is not None:
            self._stop.set()

    async def _serve(self, on_ready: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._stops_early:
            return
        delivery = Delivery(self._loop)
        actor = self._build_actor(delivery)
        service = self._service = self._build_service(actor)
        _LOG.info("preparing the tokenizer")
        service.warm_up()
        self.app = build_app(service)
        runner = self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=self.config.client_timeout_s,  # runs while headers are on their way, too
            logger=_HTTP_LOG,
        )
        await runner.setup()
        sites = await self._listen(runner)
        actor.start()
        assert runner.server is not None
        watch = asyncio.create_task(Watch(runner.server, actor, self.config).run())
        with self._signals():
            self._ready.set()
            _LOG.info("serving %s at %s", self.model, self.url)
            if not self.config.api_keys and not is_loopback(self.config.host):
                _LOG.warning("no API key is set: whoever reaches %s can use the model", self.config.host)
            if on_ready is not None:
                on_ready()
            await self._stop.wait()
        service.is_draining = True
        for site in sites:
            await site.stop()
        if self._failure is None:
            await self._drain(actor)
        await self._stop_engine(actor)
        if self._failure is not None:
            delivery.fail_all(self._failure)
        delivery.deliver()
        watch.cancel()
        await runner.cleanup()
        service.aside.close()
        if self._failure is None:
            _LOG.info("stopped")
        else:
            _LOG.critical("stopped: the engine failed: %s", self._failure)

    async def _listen(self, runner: web.AppRunner) -> list[web.SockSite]:
        listener = self._listener or Listener(self.config.host, self.config.port)
        self.port = listener.port
        sites = [web.SockSite(runner, bound, backlog=1024) for bound in listener.sockets]
        try:
            for site in sites:
                await site.start()
        except OSError as error:  # another server was faster to listen
            listener.close()
            raise InvalidRequest("port", self.port, f"a port that is free on {self.config.host}") from error
        return sites

    def _build_actor(self, delivery: Delivery) -> EngineActor:
        actor = EngineActor(
            self._engine,
            queue_capacity=self.config.request_queue_capacity,
            max_active=self.config.max_active_sessions,
            admissions_per_step=self.config.admissions_per_step,
            stall_timeout_s=self.config.stall_timeout_s,
            wake=delivery.wake,
            on_failure=self.fail,
        )
        delivery.attach(actor)
        return actor

    def _build_service(self, actor: EngineActor) -> Service:
        metrics = HttpMetrics()
        metrics.set_limits(self.config.limits())
        metrics.watch("resin_http_queue_depth", "Choices that wait for admission.", lambda: actor.queued)
        metrics.watch("resin_http_connections", "Clients that are connected.", lambda: self.connections)
        metrics.watch("resin_http_step_age_seconds", "How long the current step has taken.", lambda: actor.step_age_s)
        metrics.watch("resin_http_active_sessions", "Choices that the engine holds.", lambda: actor.active)
        return Service(
            self._engine,
            actor,
            model=self.model,
            recipe=self._recipe,
            tokenizer=self._tokenizer,
            sampling=self._sampling,
            config=self.config,
            metrics=metrics,
        )

    async def _drain(self, actor: EngineActor) -> None:
        """Waits for what runs, as long as the config allows."""
        actor.close_intake()
        deadline = asyncio.get_running_loop().time() + self.config.drain_timeout_s
        while (actor.active or actor.queued) and asyncio.get_running_loop().time() < deadline and self._failure is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)

    async def _stop_engine(self, actor: EngineActor) -> None:
        """Waits for the end of the current step, but not for ever."""
        actor.stop()
        limit_s = STOP_LIMIT_S if self._failure is None else FAILED_LIMIT_S
        deadline = asyncio.get_running_loop().time() + limit_s
        while actor.is_alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if actor.is_alive:
            why = f"the engine's last step has not returned for {actor.step_age_s:.0f} s"
            self._failure = EngineHangs(why if self._failure is None else f"{self._failure}; {why}")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = self._loop
        assert loop is not None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
