"""The `resin` command."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata

from resin.plan import ResinError
from serve.commands import chat, convert, download, generate, inspect, serving, verify


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their arguments."""
    parser = argparse.ArgumentParser(prog="resin", description="Building blocks for LLM inference in JAX.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (chat, serving, generate, download, convert, inspect, verify):
        command.add_parser(commands)
    return parser


def _version() -> str:
    return f"resin {metadata.version('resin')} (jax {metadata.version('jax')}, Python {platform.python_version()})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; mistakes of the user end in one line, not a traceback.

    Returns:
        The exit status: 0, 1 for what went wrong while running, 130 after Ctrl-C.
    """
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
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
