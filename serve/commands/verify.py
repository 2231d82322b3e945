"""`resin verify`: runs a model through every equality that the engine promises, and against reference logits."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from resin.models.registry import open_checkpoint, resolve
from resin.plan import InvalidRequest
from serve.progress import ProgressBar

# Told again here, as the command line comes up without what the checks need.
CHECKS = (
    "plain forward",
    "batched",
    "chunked",
    "overlapped",
    "buckets",
    "prefix cold",
    "prefix hit",
    "conversation",
    "retracted",
    "stale pages",
    "drafts",
    "reference logits",
    "reference steps",
    "serving kernels",
)
_EPILOG = f"""\
The checks: {", ".join(CHECKS[:8])},
{", ".join(CHECKS[8:])}; those of a reference need --reference.
Weights and cache are float32; --kv-dtype keeps keys and values in 8 bits. A reference is an .npz file with
token_ids [T] and logits [T, vocab] of another implementation. The exit status is 0 if every check passed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser(
        "verify",
        help="check a model against itself and a reference",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="MODEL", help="registered name, directory, GGUF file or hub id")
    parser.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="model class from outside this package")
    parser.add_argument("--reference", type=Path, metavar="NPZ", help="token ids and logits to compare with")
    parser.add_argument(
        "--checks",
        type=_names,
        default=(),
        metavar="NAME,...",
        help="run these alone, as in --checks 'plain forward,drafts'; default: all",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float8_e4m3fn",),
        help="check with keys and values in 8 bits; not beside --reference; default: in 32",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints a table; returns 1 if a check failed."""
    if args.kv_dtype is not None and args.reference is not None:
        raise InvalidRequest("kv_dtype", args.kv_dtype, "no --reference, which knows nothing of 8-bit keys")
    reference = _read_reference(args.reference) if args.reference is not None else None
    from resin.conformance import Settings, choose_checks, verify

    choose_checks(args.checks, reference=reference)
    with ProgressBar("fetching") as bar:
        checkpoint = open_checkpoint(resolve(args.source), bar.update)
    bar = ProgressBar("preparing")
    try:
        report = verify(
            checkpoint,
            model=args.model,
            reference=reference,
            settings=Settings(kv_dtype=args.kv_dtype),
            only=args.checks,
            progress=bar.update,
        )
    finally:
        checkpoint.close()
    bar.close()
    print(report)
    return 0 if report.passed else 1


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _read_reference(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path) as file:
            reference = {name: np.asarray(file[name]) for name in ("token_ids", "logits")}
    except (KeyError, ValueError) as error:
        raise InvalidRequest("reference", str(path), f"an .npz file with token_ids and logits ({error})") from error
    ids, logits = reference["token_ids"], reference["logits"]
    if ids.ndim != 1 or logits.ndim != 2 or len(ids) != len(logits) or len(ids) < 2:
        raise InvalidRequest("reference", (ids.shape, logits.shape), "token_ids [T] and logits [T, vocab], T above 1")
    return reference
