"""`resin download`: fetches a model's files and does nothing else."""

from __future__ import annotations

import argparse

from resin.models.registry import MODELS, download
from serve.progress import ProgressBar


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    names = "\n".join(f"  {spec.name:16} {spec.description}; {spec.licence}" for spec in MODELS.values())
    parser = commands.add_parser(
        "download",
        help="fetch a model, resuming an earlier attempt",
        description=__doc__,
        epilog=f"registered models:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="MODEL", help="registered name or hub id owner/name[@revision]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints where the files are."""
    with ProgressBar("fetching") as bar:
        path = download(args.source, bar.update)
        bar.close(args.source)
    print(path)
    return 0
