"""From command-line arguments to a warm engine and its recipe."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resin.models.loading import CheckpointError
from resin.models.registry import advised_sampling, open_checkpoint, resolve
from resin.models.sampling_defaults import SamplingDefaults, read_sampling_defaults
from resin.plan import InvalidRequest
from resin.recipes import NATIVE_RECIPES, Recipe, choose_recipe, get_native_recipe
from resin.recipes.tokenizer import ChatTokenizer
from serve.commands.options import chosen_sampling, policy, runner_options
from serve.loaded_model import LoadedModel
from serve.progress import ProgressBar

if TYPE_CHECKING:
    from resin import Engine
    from resin.runtime import ModelRunner


def load_model(args: argparse.Namespace, make: Callable[..., ModelRunner] | None = None) -> LoadedModel:
    """Loads, binds and warms up, and says on standard error what it does and what was chosen.

    Args:
        make: for `load_runner`; None takes its default.

    Raises:
        ResinError: whatever the user can put right.
    """
    check_recipe(args.recipe)
    source = resolve(args.source)
    SamplingDefaults().overridden(**chosen_sampling(args))  # mistakes are found before anything is fetched
    with ProgressBar("fetching") as bar:
        files = source.fetch(bar.update)
        checkpoint = open_checkpoint(files)
        model_type, notes = str(checkpoint.config.get("model_type", "")), checkpoint.notes
        checkpoint.close()
    for note in notes:
        print(note, file=sys.stderr)
    sampling = choose_sampling(args, files)
    # jax is imported only now: usage errors and downloads do not wait for it.
    with ProgressBar("importing") as bar:
        import jax

        from resin import Engine
        from resin.runtime import ModelRunner, load_runner

        bar.close(f"JAX {jax.__version__}")
    with ProgressBar("preparing") as bar:
        runner = load_runner(files, runner_options(args), model=args.model, make=make or ModelRunner)
        if runner.tokenizer is None:
            raise CheckpointError(files, "has no tokenizer: only the library runs it, from token ids")
        recipe = _find_recipe(args.recipe, model_type, runner.tokenizer)
        engine = Engine(
            runner,
            prefix_cache=args.prefix_cache,
            overlap=args.overlap,
            policy=policy(args),
            record=args.record,
        )
        bar.close(_describe(runner, engine, has_prefix_cache=args.prefix_cache))
    with ProgressBar("compiling") as bar:
        runner.compile(bar.update)
        bar.close(f"{len(runner.config.buckets)} programs ready")
    with ProgressBar("loading") as bar:
        runner.warm_up(bar.update)
        bar.close(args.source)
    print(f"runs with: {engine.resolved}", file=sys.stderr)
    print(f"sampling unless told otherwise: {sampling}", file=sys.stderr)
    return LoadedModel(_served_name(args.source), engine, runner.tokenizer, recipe, sampling)


def choose_sampling(args: argparse.Namespace, files: Path) -> SamplingDefaults:
    """The options, else what the checkpoint says, else the registry, else Resin's own.

    Raises:
        InvalidRequest: an option out of its range.
        CheckpointError: the checkpoint's values are out of theirs.
    """
    return read_sampling_defaults(files, advised_sampling(args.source)).overridden(**chosen_sampling(args))


def _describe(runner: ModelRunner, engine: Engine, *, has_prefix_cache: bool) -> str:
    """What was chosen for this model and machine."""
    chosen = (
        f"{runner.device.device_kind}, {runner.dtype}, {engine.context_length} tokens of context",
        f"{runner.config.max_sequences} sequences at once",
        f"{engine.arena.total_bytes / 1e6:,.0f} MB of {engine.arena.dtype} cache",
        f"prefix cache {'on' if has_prefix_cache else 'off'}",
    )
    return ", ".join(chosen)


def _served_name(source: str) -> str:
    path = Path(source)
    return path.stem if path.suffix == ".gguf" else path.name if path.is_dir() else source


def check_recipe(name: str | None) -> None:
    """Raises InvalidRequest for a recipe that no model has, or that cannot be imported."""
    if name is not None and ":" in name:
        import_object("recipe", name)
    elif name is not None and name not in NATIVE_RECIPES:
        raise InvalidRequest("recipe", name, f"one of {', '.join(NATIVE_RECIPES)}, or package.module:Name")


def _find_recipe(name: str | None, model_type: str, tokenizer: ChatTokenizer) -> Recipe | None:
    if name is None:
        choice = choose_recipe(model_type, tokenizer)
        print(f"recipe {choice.name}: {choice.reason}", file=sys.stderr)
        return choice.recipe
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
