"""`resin serve`: the HTTP server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import fields

from resin.settings import API_KEY
from serve.commands.loading import load_model
from serve.commands.options import add_model_arguments, add_sampling_arguments
from serve.config import ServerConfig

_LIMITS = {
    "request_queue_capacity": "choices that wait for admission before clients get 429",
    "max_active_sessions": "choices that the engine holds at once",
    "stream_interval": "tokens a streamed event carries at least",
    "max_output_tokens": "most tokens a request may ask for",
    "request_timeout_s": "seconds after which a request ends",
    "drain_timeout_s": "seconds that a shutdown waits for running requests",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    add_model_arguments(parser, max_sequences=16)
    add_sampling_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s")
    group.add_argument("--port", type=int, default=8000, help="0 lets the system choose; default %(default)s")
    group.add_argument("--served-name", metavar="NAME", help="what clients call the model; default: MODEL")
    group.add_argument("--quiet", action="store_true", help="no access log")
    defaults = {field.name: field.default for field in fields(ServerConfig)}
    for name, meaning in _LIMITS.items():
        kind = float if name.endswith("_s") else int
        group.add_argument(
            "--" + name.replace("_", "-"), type=kind, default=defaults[name], help=f"{meaning}; default %(default)s"
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Resin's own alone: JAX tells at this level of every platform that a machine lacks.
    logging.getLogger("resin").setLevel(logging.INFO)
    if args.quiet:
        logging.getLogger("resin.access").setLevel(logging.WARNING)
    key = API_KEY.read()
    config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=(key,) if key else (),
        **{name: getattr(args, name) for name in _LIMITS},
    )
    loaded = load_model(args)
    from serve.server import EngineHangs, HttpServer

    server = HttpServer(
        loaded.engine,
        model=args.served_name or loaded.name,
        recipe=loaded.recipe,
        tokenizer=loaded.tokenizer,
        sampling=loaded.sampling,
        config=config,
    )
    try:
        server.serve(on_ready=lambda: print(f"{server.model} is ready at {server.url}", file=sys.stderr))
    except EngineHangs as error:
        # An orderly exit would wait for the step that hangs.
        print(f"resin: {error}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)
    return 0
