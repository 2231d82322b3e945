"""HttpServer: one engine behind HTTP, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import signal
import threading
from collections.abc import Callable, Iterator

from aiohttp import web

from resin import Engine, EngineFailed
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import Recipe, Tokenizer
from serve.actor import EngineActor
from serve.app import build_app
from serve.config import ServerConfig
from serve.delivery import Delivery
from serve.http_metrics import HttpMetrics
from serve.service import Service

_LOG = logging.getLogger("resin.serve")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    ) -> None:
        config = config or ServerConfig()
        self.config = dataclasses.replace(
            config,
            request_queue_capacity=request_queue_capacity or config.request_queue_capacity,
            stream_interval=stream_interval or config.stream_interval,
        )
        self.model = model
        self.port = self.config.port
        self._engine = engine
        self._recipe = recipe
        self._tokenizer = tokenizer if tokenizer is not None else getattr(engine.runner, "tokenizer", None)
        self._sampling = sampling or SamplingDefaults()
        self._ready = threading.Event()
        self._finished = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stops_early = False
        self._failure: BaseException | None = None
        self._service: Service | None = None
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

    def serve(self, on_ready: Callable[[], None] | None = None) -> None:
        """Runs the server in this thread until `shutdown`, SIGTERM or SIGINT (in the main thread), or a failure.

        Args:
            on_ready: called once the socket accepts connections.

        Raises:
            EngineFailed: the engine broke; the listener is closed and every client has been told.
            OSError: the address cannot be listened on.
        """
        try:
            asyncio.run(self._serve(on_ready))
        finally:
            self._finished.set()
            self._ready.set()
        if self._failure is not None:
            raise EngineFailed(f"the server stopped: {self._failure}") from self._failure

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
        self.app = build_app(service)
        runner = web.AppRunner(self.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, self.config.host, self.config.port, backlog=1024)
        await site.start()
        self.port = runner.addresses[0][1]
        actor.start()
        with self._signals():
            self._ready.set()
            _LOG.info("serving %s at %s", self.model, self.url)
            if not self.config.api_keys and not _is_loopback(self.config.host):
                _LOG.warning("no API key is set: whoever reaches %s can use the model", self.config.host)
            if on_ready is not None:
                on_ready()
            await self._stop.wait()
        service.is_draining = True
        await site.stop()
        if self._failure is None:
            await self._drain(actor)
        else:
            delivery.fail_all(self._failure)
        await asyncio.to_thread(actor.stop)
        delivery.deliver()
        await runner.cleanup()
        if self._failure is None:
            _LOG.info("stopped")
        else:
            _LOG.critical("stopped: the engine failed: %s", self._failure)

    def _build_actor(self, delivery: Delivery) -> EngineActor:
        assert self._loop is not None
        loop = self._loop

        def on_failure(error: BaseException) -> None:
            self._failure = error
            loop.call_soon_threadsafe(self._request_stop)

        actor = EngineActor(
            self._engine,
            queue_capacity=self.config.request_queue_capacity,
            max_active=self.config.max_active_sessions,
            admissions_per_step=self.config.admissions_per_step,
            wake=delivery.wake,
            on_failure=on_failure,
        )
        delivery.attach(actor)
        return actor

    def _build_service(self, actor: EngineActor) -> Service:
        metrics = HttpMetrics()
        metrics.set_limits(self.config.limits())
        metrics.watch("resin_http_queue_depth", "Choices that wait for admission.", lambda: actor.queued)
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
