"""From command-line choices to a warm runner with exactly the buckets of the cases, and nothing else on the device."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench.cases import Case
from bench.shapes import SHAPES, shape_checkpoint
from resin import ArenaSpec, Bucket, CacheGroup, InvalidRequest
from resin.models.declare import Placement
from resin.models.experts import MixtureOfExperts
from resin.models.families import ModelClass, read_model
from resin.models.forward import Pass
from resin.models.loading.checkpoint import Checkpoint
from resin.models.norm import RMSNorm
from resin.models.ops.protocol import Routed
from resin.models.registry import open_checkpoint
from resin.models.routers import Router
from resin.models.weights import Progress
from resin.plan.cache import FP8_DTYPE
from resin.runtime import ModelRunner, RunnerOptions
from resin.runtime.compile_cache import use_compile_cache
from resin.runtime.executable import StepSpec
from resin.runtime.load import build_spec, check_weights, fit_options, read_weights
from resin.runtime.mesh import build_mesh
from resin.settings import CACHE_DIRECTORY


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model a benchmark runs.

    Attributes:
        model: registered name, path, hub id, or "package.module:Name" of a class.
        shape: name in `SHAPES` whose config stands for a checkpoint.
        checkpoint: weights of a class, or instead of a registered model's.
        dummy: random weights.
        balanced_experts: tokens take experts in turn.
    """

    model: str | None = None
    shape: str | None = None
    checkpoint: str | None = None
    dummy: bool = False
    balanced_experts: bool = False

    @property
    def name(self) -> str:
        """What the results call it."""
        named = self.shape or self.model or str(self.checkpoint)
        return Path(named).name if Path(named).exists() else named

    @property
    def class_name(self) -> str | None:
        """ "package.module:Name", if the model is one."""
        return self.model if self.model is not None and ":" in self.model else None

    def open(self) -> Checkpoint:
        """Opens the config and, unless they are dummies, the weights.

        Raises:
            InvalidRequest: nothing says what the model's sizes are, or a shape is asked for its weights.
        """
        known = self.model is not None and self.model in SHAPES and self.dummy and self.checkpoint is None
        if self.shape is not None or known:
            if not self.dummy:
                raise InvalidRequest("shape", self.shape, "--dummy beside it: a shape has no weights")
            return shape_checkpoint(self.shape or str(self.model))
        source = self.checkpoint or (None if self.class_name else self.model)
        if source is None:
            raise InvalidRequest(
                "model", self.model, "a name, path or hub id, or --shape or --checkpoint beside a class"
            )
        return open_checkpoint(source)


def add_model_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares what a ModelChoice and the dtypes of its runner are made of; `check_model_arguments` after parsing."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", help="registered name, path, hub id, or package.module:Name")
    group.add_argument("--shape", choices=sorted(SHAPES), help="config of a published model, without its files")
    weights = group.add_mutually_exclusive_group()
    weights.add_argument("--dummy", action="store_true", help="random weights, made on the device")
    weights.add_argument("--checkpoint", help="weights of --model")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPU, float32 on CPU")
    group.add_argument("--kv-dtype", choices=(FP8_DTYPE,), help="keep keys and values in 8 bits")
    return group


def check_model_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program with a message unless the arguments name a model."""
    if not (args.model or args.shape or args.checkpoint):
        parser.error("one of --model, --shape and --checkpoint is needed")


@dataclass(frozen=True, slots=True)
class Setup:
    """A runner that is ready, with what it was made of.

    Attributes:
        runner: warm; every case's buckets are compiled.
        spec: structure and config.
        weights: on the device, the runner's own.
        num_pages: pages of the arena.
    """

    runner: ModelRunner
    spec: StepSpec
    weights: tuple[jax.Array, ...]
    num_pages: int


def build_setup(
    choice: ModelChoice, cases: Sequence[Case], options: RunnerOptions, progress: Progress | None = None
) -> Setup:
    """Loads a model and compiles the cases' buckets.

    Args:
        choice: the model.
        cases: what will run.
        options: dtypes, seed, compile cache; sizes are set from the cases.
        progress: called while weights load and programs compile.

    Raises:
        InvalidRequest: a case is longer than the model's context, or does not fit the device.
    """
    checkpoint = choice.open()
    try:
        if options.compile_cache_bytes:
            directory = Path(options.compile_cache or CACHE_DIRECTORY.read() / "programs")
            use_compile_cache(directory, options.compile_cache_bytes)
        mesh = build_mesh(options)
        model_class, config = read_model(checkpoint, choice.class_name)
        if choice.balanced_experts:
            model_class = BalancedModel(model_class)
        options = fit_options(replace(options, dummy=choice.dummy), checkpoint)
        spec = build_spec(model_class, config, sized_options(options, cases), mesh)
        spec = replace(spec, config=replace(spec.config, buckets=all_buckets(spec, cases)))
        check_weights(spec, checkpoint, options)
        runner = ModelRunner(
            spec,
            partial(read_weights, spec, checkpoint, options),
            model_config=config,
            compile_threads=options.compile_threads,
        )
        num_pages = 1 + max(case.pages(spec.config) for case in cases)
        runner.bind(ArenaSpec(num_pages, spec.config.geometry.page_bytes, spec.config.arena_dtype))
        runner.warm_up(progress)
    finally:
        checkpoint.close()
    return Setup(runner, spec, runner.weights, num_pages)


def sized_options(options: RunnerOptions, cases: Sequence[Case]) -> RunnerOptions:
    """The options with room for every case."""
    most = max(case.sequences for case in cases)
    return replace(
        options,
        max_sequences=most,
        max_context_tokens=max(case.max_context_tokens for case in cases),
        decode_sequences=tuple(sorted({case.sequences for case in cases})),
        prefill_tokens=tuple(sorted({case.plan_tokens for case in cases})),
        prefill_sequences=most,
    )


def all_buckets(spec: StepSpec, cases: Sequence[Case]) -> tuple[Bucket, ...]:
    """The cases' buckets, each once, smallest first within its phase."""
    buckets = {bucket for case in cases for bucket in case.buckets(spec.config)}
    return tuple(sorted(buckets, key=lambda bucket: (bucket.phase, bucket.tokens, bucket.sequences, bucket.row_pages)))


class BalancedModel:
    """A model class whose tokens take experts in turn: token t, choice i, takes expert (t * k + i) mod E."""

    def __init__(self, model_class: ModelClass) -> None:
        self._model_class = model_class
        self.Config = model_class.Config

    def cache_groups(self, config: Any, placement: Placement) -> tuple[CacheGroup, ...]:
        return self._model_class.cache_groups(config, placement)

    def __call__(self, config: Any, placement: Placement) -> Any:
        model = self._model_class(config, placement)
        found = [module for _, module in nnx.iter_modules(model) if isinstance(module, MixtureOfExperts)]
        if not found:
            raise InvalidRequest("balanced_experts", True, "a model with experts")
        for module in found:
            module.router = BalancedRouter(module.router, module.num_experts)
        return model


class BalancedRouter(Router):
    """Scores as the router inside does, and keeps its weights, but takes experts in turn."""

    def __init__(self, router: Router, experts: int) -> None:
        self.router = router
        self.experts = experts

    def __call__(self, run: Pass, x: jax.Array, norm: RMSNorm | None = None) -> Routed:
        routed = self.router(run, x, norm)
        tokens, choices = routed.experts.shape
        turn = jnp.arange(tokens * choices, dtype=jnp.int32).reshape(tokens, choices)
        return routed._replace(experts=jnp.where(run.tokens.live[:, None], turn % self.experts, -1))
