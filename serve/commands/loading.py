"""From command-line arguments to a warm engine and its recipe."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resin.models.registry import DEFAULT_MODEL, open_checkpoint, resolve
from resin.plan import InvalidRequest
from resin.recipes import NATIVE_RECIPES, Recipe, find_recipe, get_native_recipe
from resin.recipes.tokenizer import ChatTokenizer
from serve.progress import ProgressBar

if TYPE_CHECKING:
    from resin import Engine


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine that is ready to step, and what turns its tokens into conversation.

    Attributes:
        name: what clients call the model.
        recipe: None if the model has no chat format.
    """

    name: str
    engine: Engine
    tokenizer: ChatTokenizer
    recipe: Recipe | None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end raw text, by the checkpoint's own account."""
        own = getattr(self.engine.runner, "eos_token_ids", ())
        return tuple(dict.fromkeys([*own, *self.tokenizer.eos_ids]))


def add_model_arguments(parser: argparse.ArgumentParser, *, max_sequences: int) -> None:
    """The arguments that `load_model` reads."""
    parser.add_argument(
        "source",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"registered name, local path (directory or GGUF file) or hub id; default {DEFAULT_MODEL}",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="model class from outside this package")
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"conversation format: {', '.join(NATIVE_RECIPES)}, or package.module:Name; default: the model's own",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and activations")
    group.add_argument("--context-length", type=int, metavar="TOKENS", help="longest sequence, prompt and answer")
    group.add_argument("--max-sequences", type=int, metavar="N", default=max_sequences, help="default %(default)s")
    group.add_argument("--max-plan-tokens", type=int, metavar="TOKENS", help="tokens of the largest prefill step")
    group.add_argument("--cache-bytes", type=int, metavar="BYTES", help="size of the cache pool on each device")
    group.add_argument("--kv-dtype", choices=("float8_e4m3fn",), help="keep keys and values in 8 bits")
    group.add_argument(
        "--kv-scale", type=float, metavar="X", default=1.0, help="of 8-bit keys and values: stored as value / X"
    )
    group.add_argument("--tp", type=int, metavar="N", default=1, help="devices to split the model over")
    group.add_argument("--prefix-cache", action="store_true", help="reuse cached prefixes across requests")
    group.add_argument(
        "--overlap",
        type=int,
        default=1,
        metavar="N",
        help="plans in flight while the next is made (default %(default)s; 0 waits, 2 suits steps below 1.5 ms)",
    )
    group.add_argument("--dummy", action="store_true", help="random weights, for measurements")


def load_model(args: argparse.Namespace) -> LoadedModel:
    """Loads, binds and warms up.

    Raises:
        ResinError: whatever the user can put right.
    """
    source = resolve(args.source)
    bar = ProgressBar("fetching")
    files = source.fetch(bar.update)
    checkpoint = open_checkpoint(files)
    model_type = str(checkpoint.config.get("model_type", ""))
    checkpoint.close()
    # jax is imported only now: usage errors and downloads do not wait for it.
    from resin import Engine
    from resin.runtime import RunnerOptions, load_runner

    options = RunnerOptions(
        dtype=args.dtype,
        max_sequences=args.max_sequences,
        max_context_tokens=args.context_length,
        max_plan_tokens=args.max_plan_tokens,
        cache_bytes=args.cache_bytes,
        kv_dtype=args.kv_dtype,
        kv_scale=args.kv_scale,
        tp=args.tp,
        dummy=args.dummy,
    )
    runner = load_runner(files, options, model=args.model)
    engine = Engine(runner, prefix_cache=args.prefix_cache, overlap=args.overlap)
    bar = ProgressBar("compiling")
    runner.compile(bar.update)
    bar.close(f"{len(runner.config.buckets)} programs ready")
    bar = ProgressBar("loading")
    runner.warm_up(bar.update)
    bar.close(args.source)
    recipe = _find_recipe(args.recipe, model_type, runner.tokenizer)
    return LoadedModel(_served_name(args.source), engine, runner.tokenizer, recipe)


def _served_name(source: str) -> str:
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else source


def _find_recipe(name: str | None, model_type: str, tokenizer: ChatTokenizer) -> Recipe | None:
    if name is None:
        try:
            return find_recipe(model_type, tokenizer)
        except InvalidRequest:
            return None
    if ":" in name:
        recipe = import_object("recipe", name)(tokenizer)
        if not isinstance(recipe, Recipe):
            raise InvalidRequest("recipe", name, "a class or function whose result is a Recipe")
        return recipe
    return get_native_recipe(name, tokenizer)


def import_object(field: str, name: str) -> Any:
    """What `package.module:Name` stands for.

    Raises:
        InvalidRequest: no such module or name; `field` says whose value it was.
    """
    module_name, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(field, name, f"package.module:Name that can be imported ({error})") from error
