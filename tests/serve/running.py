"""A server on a loopback port for the length of a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from resin import Engine
from resin.models.sampling_defaults import SamplingDefaults
from resin.recipes import get_native_recipe
from serve import HttpServer, ServerConfig
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner


@contextlib.contextmanager
def running_server(
    runner: ScriptedRunner,
    *,
    recipe: str | None = "qwen3",
    engine_options: dict[str, Any] | None = None,
    sampling: SamplingDefaults | None = None,
    **settings: Any,
) -> Iterator[HttpServer]:
    """Serves the runner; on exit the server must have come to rest with nothing left behind."""
    engine = Engine(runner, **(engine_options or {}))
    server = HttpServer(
        engine,
        recipe=get_native_recipe(recipe, TOKENIZER) if recipe is not None else None,
        model="scripted",
        sampling=sampling,
        config=ServerConfig(port=0, drain_timeout_s=5, **settings),
    )
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert server.wait_ready(10), failures
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        assert not thread.is_alive()
    expects_failure = runner.fails_with is not None
    assert bool(failures) == expects_failure, failures
    if not expects_failure:
        assert not engine.has_work()
        assert not list(engine.scheduler.running())
