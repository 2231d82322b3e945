"""`resin inspect`: what a model is and what it needs, from its config and tokenizer; no weight is read."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from resin.models.loading import CheckpointError
from resin.models.loading.directory import read_json_object
from resin.models.registry import DEFAULT_MODEL, open_checkpoint, resolve
from resin.models.sources import HubSource
from resin.plan import InvalidRequest
from resin.recipes import choose_recipe
from resin.recipes.tokenizer import load_tokenizer
from resin.topology import MeshShape
from serve.progress import ProgressBar

_GIBIBYTE = 1 << 30


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the subcommand."""
    parser = commands.add_parser("inspect", help="weights, cache and memory of a model", description=__doc__)
    parser.add_argument(
        "source",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help="registered name, directory, GGUF file, config.json or hub id; default %(default)s",
    )
    parser.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="model class from outside this package")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default %(default)s")
    parser.add_argument(
        "--memory-gib",
        type=float,
        nargs="*",
        default=[16, 24, 80, 141],
        metavar="GIB",
        help="memory sizes to fill; default: 16 24 80 141",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="devices to split the model over; default 1")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="replicas of attention; default 1")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the summary."""
    for size in args.memory_gib:
        if not size > 0:
            raise InvalidRequest("memory_gib", size, "a number above 0")
    config = _read_config(args.source)
    from resin.models.summary import summarise

    summary = summarise(config, model=args.model, dtype=args.dtype, mesh=MeshShape(dp=args.dp, tp=args.tp))
    fits = {
        size: [summary.context_that_fits(int(size * _GIBIBYTE), sequences) for sequences in (1, 16, 256)]
        for size in args.memory_gib
    }
    recipe = _describe_recipe(args.source, str(config.get("model_type", "")))
    if args.json:
        print(json.dumps({**dataclasses.asdict(summary), "context_that_fits": fits, "recipe": recipe}, indent=1))
        return 0
    print(f"{args.source}: {summary.family}, {summary.parameters / 1e6:,.1f} M parameters")
    for field in dataclasses.fields(summary.config):
        print(f"  {field.name} = {_short(getattr(summary.config, field.name))}")
    print(f"\nrecipe: {recipe}")
    print(f"\nweights: {_size(summary.weight_nbytes)}, {summary.flops_per_token / 1e9:,.2f} GFLOP a token")
    if summary.mesh.size > 1:
        print(f"  {_size(summary.device_nbytes)} on each of {summary.mesh.size} devices ({summary.mesh})")
    for row in summary.weights:
        shape = "x".join(map(str, row.shape))
        sources = row.sources[0] + (f" and {len(row.sources) - 1} more" if len(row.sources) > 1 else "")
        print(f"  {row.count:3} x {shape:20} {row.dtype:9} {_size(row.nbytes):>10}  {row.name}  <- {sources}")
    whose = " of a device" if summary.mesh.size > 1 else ""
    print(f"\ncache{whose}: pages of {_size(summary.page_bytes)}, {summary.token_nbytes:,.0f} bytes a token", end="")
    print(f", {_size(summary.sequence_nbytes)} a sequence")
    for item in summary.cache:
        fill = (
            f"{item.pages_per_state} pages a state" if item.pages_per_state else f"{item.page_entries} entries a page"
        )
        print(
            f"  {item.name:10} {item.kind:8} {_size(item.entry_nbytes):>10} an entry, {fill}, {item.waste:.1%} wasted"
        )
    print("\ntokens of context that fit beside the weights, for 1, 16 and 256 sequences:")
    for size, contexts in fits.items():
        print(f"  {size:6g} GiB  " + "  ".join(f"{context:>9,}" for context in contexts))
    return 0


def _describe_recipe(source: str, model_type: str) -> str:
    """Which conversation format the model gets and why, or why none."""
    path = Path(source)
    found = path if path.suffix == ".json" and path.is_file() else resolve(source).find()
    if found is None:
        return "unknown until the tokenizer is downloaded"
    try:
        choice = choose_recipe(model_type, load_tokenizer(found))
    except (CheckpointError, InvalidRequest) as error:
        return f"none: {error}"
    return f"{choice.name}: {choice.reason}"


def _read_config(source: str) -> dict[str, object]:
    path = Path(source)
    if path.suffix == ".json" and path.is_file():
        return read_json_object(path)
    found = resolve(source)
    if isinstance(found, HubSource) and found.find() is None:
        return found.fetch_config()
    with ProgressBar("fetching") as bar:
        checkpoint = open_checkpoint(found, bar.update)
    try:
        return dict(checkpoint.config)
    finally:
        checkpoint.close()


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
