"""Tiny runners for runtime tests: one set of buckets small enough to compile in a second or two."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from resin.models.declare import Placement
from resin.models.families import find_model_class, sequence_logits
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, random_checkpoint
from resin.models.weights import AbstractModel, load_weights
from resin.plan import ArenaSpec
from resin.runtime import ModelRunner, RunnerOptions, build_runner
from resin.runtime.mesh import build_mesh
from tests.plan_builder import PlanBuilder

# Large enough that a copy of the arena (64 MiB) would dwarf every other temporary.
NUM_PAGES = 8192


def tiny_options(**changes: object) -> RunnerOptions:
    """Two prefill and two decode buckets, 16-token pages, no compile cache."""
    settings = {
        "max_sequences": 4,
        "max_context_tokens": 128,
        "decode_sequences": (1, 4),
        "prefill_tokens": (8, 32),
        "page_tokens": 16,
        "compile_cache_bytes": 0,
        "compile_threads": 2,
    }
    return RunnerOptions(**(settings | changes))  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def tiny_checkpoint(family: str) -> MemoryCheckpoint:
    return random_checkpoint(TINY_CONFIGS[family], seed=5)


def build_tiny(family: str = "llama", **changes: object) -> ModelRunner:
    """A warm runner over random weights."""
    runner = build_runner(tiny_checkpoint(family), tiny_options(**changes))
    runner.bind(ArenaSpec(NUM_PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    runner.warm_up()
    return runner


def builder_for(runner: ModelRunner) -> PlanBuilder:
    return PlanBuilder(runner.config, NUM_PAGES)


@lru_cache(maxsize=4)
def _reference(family: str):  # type: ignore[no-untyped-def]
    checkpoint = tiny_checkpoint(family)
    model_class = find_model_class(checkpoint.config)
    abstract = AbstractModel.of(model_class(model_class.Config.from_hf(checkpoint.config), Placement()))
    weights = load_weights(abstract, checkpoint, build_mesh(RunnerOptions()))
    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda ids: sequence_logits(abstract.merge(weights), ids))


def reference_logits(family: str, token_ids: list[int]) -> np.ndarray:
    """float32 [T, V] by the plain whole-sequence forward; padded inside so that few lengths compile."""
    padded = np.zeros(-(-len(token_ids) // 64) * 64, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_reference(family)(jnp.asarray(padded)))[: len(token_ids)]


def reference_greedy(family: str, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(family, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
