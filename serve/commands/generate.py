"""`resin generate`: offline generation from a file of requests to a file of results."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from serve.commands.loading import load_model
from serve.commands.options import add_model_arguments, add_sampling_arguments
from serve.progress import ProgressBar

_EPILOG = """\
Each input line is a JSON object: "id", one of "prompt_ids", "prompt" and "messages", and fields under their OpenAI
names ("max_tokens", "temperature", "seed", "stop", "logprobs": 5, "response_format", ...). Each result line has "id",
"token_ids" (the stop token included when one ended it), "text", "finish_reason", "logprobs" and "usage", or "error".
Results come in the order in which they are complete. A run that was interrupted goes on where it stopped: lines whose
id is in the output already are left out."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "generate",
        help="generate for a file of requests",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="requests, one JSON object a line; may be a pipe"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="results; appended to")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="for lines that do not say; default %(default)s"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if any line was at fault, which its own result says."""
    from serve.offline import InputLines, OfflineRun, read_done

    done = read_done(args.output)
    counts = {"written": 0, "faulty": 0, "tokens": 0}
    skipped = len(done.ids) + len(done.lines)
    # Opened before the model: whether results can be written is found at once.
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(args.input.open("rb"))
        is_live = not args.input.is_file()  # a pipe can be read but once, and its end may be far
        total = None if is_live else _count(file)
        output = stack.enter_context(_appending(args.output))
        loaded = load_model(args)
        stack.enter_context(loaded.engine)
        bar = stack.enter_context(ProgressBar("generating"))

        def write(result: dict[str, Any]) -> None:
            output.write(msgspec.json.encode(result) + b"\n")
            output.flush()
            counts["written"] += 1
            counts["faulty"] += "error" in result
            counts["tokens"] += len(result.get("token_ids", ()))
            bar.update(f"{counts['tokens']} tokens", skipped + counts["written"], total)

        # Twice what runs at once keeps the engine's own queue from running dry.
        offline = OfflineRun(loaded, default_max_tokens=args.max_tokens, at_once=2 * loaded.engine.config.max_sequences)
        offline.run(InputLines(file, is_live=is_live), done, write)
        faults = f", {counts['faulty']} of them errors" if counts["faulty"] else ""
        bar.close(f"{counts['written']} results{faults}, {counts['tokens']} tokens, {skipped} done before")
    return 1 if counts["faulty"] else 0


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[IO[bytes]]:
    """The open file; a disk that takes no more is said with the file's name."""
    try:
        with path.open("ab") as file:
            yield file
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _count(file: IO[bytes]) -> int:
    """How many requests a file holds; it is at its beginning then, as it was."""
    count = sum(1 for line in file if line.strip())
    file.seek(0)
    return count
