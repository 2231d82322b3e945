"""`resin serve`: the HTTP server."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from resin.settings import API_KEY
from resin.topology import Launch
from serve.commands.loading import load_model
from serve.commands.options import add_model_arguments, add_sampling_arguments
from serve.commands.ranks import add_rank_arguments, launch_of, lead, leave, work
from serve.config import ServerConfig
from serve.listener import Listener

if TYPE_CHECKING:
    from resin.runtime.worker import Ranks

_LIMITS = {
    "request_queue_capacity": "choices that wait for admission before clients get 429",
    "max_active_sessions": "choices that the engine holds at once",
    "admissions_per_step": "choices handed to the engine before each step",
    "client_buffer_events": "steps whose tokens may wait for a socket that does not drain",
    "stream_interval": "tokens a streamed event carries at least",
    "max_body_bytes": "size of the largest request body",
    "max_output_tokens": "most tokens a request may ask for",
    "max_choices": "most choices (n) of one request",
    "request_timeout_s": "seconds after which a request ends",
    "client_timeout_s": "seconds for a request's headers, for its body, and without taking anything of an answer",
    "retry_after_s": "seconds that a 429 asks clients to wait",
    "stall_timeout_s": "seconds that a step may take before /health answers 503",
    "drain_timeout_s": "seconds that a shutdown waits for running requests",
    "stored_responses": "Responses kept for previous_response_id",
    "stored_response_bytes": "size that they may take together",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("serve", help="serve a model over HTTP", description=__doc__)
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    add_rank_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; default %(default)s")
    group.add_argument("--port", type=int, default=8000, help="0 lets the system choose; default %(default)s")
    group.add_argument("--served-name", metavar="NAME", help="what clients call the model; default: MODEL")
    group.add_argument("--quiet", action="store_true", help="no access log, which is one JSON object a line on stdout")
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name under which clients reach this server, such as a proxy's; may be given again; default none",
    )
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="https://host:port whose pages may use this server; may be given again; default none",
    )
    defaults = {field.name: field.default for field in fields(ServerConfig)}
    for name, meaning in _LIMITS.items():
        default = "what the context holds" if defaults[name] is None else "%(default)s"
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=float if isinstance(defaults[name], float) else int,
            default=defaults[name],
            help=f"{meaning}; default {default}",
        )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Resin's own alone: JAX tells at this level of every platform that a machine lacks.
    logging.getLogger("resin").setLevel(logging.INFO)
    key = API_KEY.read()
    config = ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=(key,) if key else (),
        allowed_hosts=tuple(args.allowed_host),
        allowed_origins=tuple(args.allowed_origin),
        **{name: getattr(args, name) for name in _LIMITS},
    )
    launch = launch_of(args)
    if launch.rank:
        return work(args, launch)
    # Taken before the model is loaded: whether the address can be had is known at once.
    with Listener(config.host, config.port) as listener:
        return _serve(args, config, listener) if launch.processes == 1 else _lead(args, config, listener, launch)


def _open_access_log(*, is_quiet: bool) -> None:
    access = logging.getLogger("resin.access")
    access.propagate = False  # nothing but JSON on this stream
    access.addHandler(logging.NullHandler() if is_quiet else logging.StreamHandler(sys.stdout))


def _lead(args: argparse.Namespace, config: ServerConfig, listener: Listener, launch: Launch) -> int:
    ranks = lead(args, launch)
    try:
        status = _serve(args, config, listener, ranks)
    except Exception as error:
        leave(error)
    ranks.close()
    return status


def _serve(args: argparse.Namespace, config: ServerConfig, listener: Listener, ranks: Ranks | None = None) -> int:
    loaded = load_model(args) if ranks is None else load_model(args, ranks.make_runner)
    from serve.server import EngineHangs, HttpServer

    server = HttpServer(
        loaded.engine,
        model=args.served_name or loaded.name,
        recipe=loaded.recipe,
        tokenizer=loaded.tokenizer,
        sampling=loaded.sampling,
        config=config,
        listener=listener,
    )
    if ranks is not None:
        ranks.on_lost = server.fail
    # What is alive now stays alive: walking through it would stop every stream for a moment, again and again.
    gc.collect()
    gc.freeze()
    _open_access_log(is_quiet=args.quiet)
    try:
        server.serve(on_ready=lambda: print(f"{server.model} is ready at {server.url}", file=sys.stderr))
    except EngineHangs as error:
        # An orderly exit would wait for the step that hangs.
        print(f"resin: {error}", file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)
    return 0
