"""The `resin` command. Its imports come inside its functions: from the first moment Ctrl-C ends it quietly."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

INTERRUPTED = 128 + signal.SIGINT


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments."""
    from serve.commands import chat, convert, download, generate, inspect, serving, verify

    parser = argparse.ArgumentParser(prog="resin", description="Building blocks for LLM inference in JAX.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (chat, serving, generate, download, convert, inspect, verify):
        command.add_parser(commands)
    return parser


def _version() -> str:
    import platform
    from importlib import metadata

    return f"resin {metadata.version('resin')} (jax {metadata.version('jax')}, Python {platform.python_version()})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; mistakes of the user end in one line, not a traceback.

    Args:
        arguments: None takes those of the process, which is then left without a delay after Ctrl-C.

    Returns:
        The exit status: 0, 1 for what went wrong while running, 130 after Ctrl-C.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        if arguments is None:
            _leave()
        print(file=sys.stderr)
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    from resin.plan import ResinError
    from resin.plan.extras import require

    try:
        require("serve")
    except ResinError as error:
        print(f"resin: {error}", file=sys.stderr)
        return 1
    args = build_parser().parse_args(arguments)
    if getattr(args, "model", None) and os.getcwd() not in sys.path:
        # An installed script looks for modules beside itself; users keep a model file where they work.
        sys.path.insert(0, os.getcwd())
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # as in `resin inspect | head`: nobody wants the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ResinError, OSError) as error:
        print(f"resin: {error}", file=sys.stderr)
        return 1
    return status


def _leave() -> None:
    """Ends the process: what threads still compile or read is of no use any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        print(file=sys.stderr)
        sys.stdout.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
