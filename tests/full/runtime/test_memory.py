"""No program of any bucket copies the arena, whatever groups it holds: temporaries are those of the activations.

Programs are compiled against shapes alone, so that arenas of 4 GiB take no memory. For a GPU they are compiled where
XLA's CUDA plugin is installed, with a device or without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from bench.shapes import SHAPES
from resin.models.families import find_model_class
from resin.models.testing import TINY_CONFIGS
from resin.plan import ArenaSpec, Bucket
from resin.runtime import RunnerOptions
from resin.runtime.executable import StepSpec, compile_step
from resin.runtime.ledger import program_temporary_bytes
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh
from tests.runtime.cuda_topology import abstract_gpu_mesh, has_cuda_compiler

ARENA_BYTES = 4 << 30
PROMPT_ROWS = 64  # whose logits are made at once
# The bound on activations: so many arrays of float32 as wide as the widest layer, and so many of logits, live at once.
# A sort has its logits and their ids, both twice, beside what else there is of them.
LAYER_ARRAYS, LOGIT_ARRAYS = 8, 8
SCRATCH_BYTES = 1 << 20  # what does not grow with tokens: partial sums, counters, tiles of attention


def activation_bytes(spec: StepSpec, bucket: Bucket) -> int:
    """The stated bound on what a step of this bucket needs beside weights, arena and slots."""
    vocab = spec.config.vocab_size
    matrices = [item for item in spec.model.declarations if item.inner]
    outer = [math.prod(item.shape[item.shape.index(item.inner) + 1 :]) for item in matrices]
    widths = [size for size in (*outer, *(item.inner for item in matrices)) if size != vocab]
    rows = max(bucket.sequences, min(bucket.tokens, PROMPT_ROWS))
    return 4 * (LAYER_ARRAYS * bucket.tokens * max(widths) + LOGIT_ARRAYS * rows * vocab) + SCRATCH_BYTES


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The first layers, one of each kind among them."""
    config = dict(config) | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][-layers:]
    return config


def check_temporaries(config: Mapping[str, Any], mesh: Mesh, **changes: Any) -> None:
    """Compiles every program of two buckets and holds its temporaries against the bound."""
    model_class = find_model_class(config)
    settings = {"decode_sequences": (4,), "prefill_tokens": (32,), "max_sequences": 4, "max_context_tokens": 128}
    options = RunnerOptions(**(settings | {"page_tokens": 16, "compile_cache_bytes": 0} | changes))
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, mesh)
    geometry = spec.config.geometry
    arena = ArenaSpec(math.ceil(ARENA_BYTES / geometry.page_bytes), geometry.page_bytes, spec.config.arena_dtype)
    for bucket in spec.config.buckets:
        bound = activation_bytes(spec, bucket)
        for kind in spec.kinds(bucket):
            used = program_temporary_bytes(compile_step(spec, bucket, arena, kind))
            assert used <= bound, f"{bucket}, {kind}: {used / 1e6:.1f} MB, {bound / 1e6:.1f} allowed"


# One group of each kind, and the two ways to append: through a kernel that turns the heads, and by a scatter.
QUICK = {"llama": 2, "lfm2": 3, "gemma3_text": 3}


@pytest.mark.parametrize("family", QUICK)
def test_on_a_cpu(family: str) -> None:
    check_temporaries(shortened(TINY_CONFIGS[family], QUICK[family]), build_mesh(RunnerOptions()))


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family_on_a_cpu(family: str) -> None:
    check_temporaries(
        TINY_CONFIGS[family], build_mesh(RunnerOptions()), decode_sequences=(1, 4), prefill_tokens=(8, 32)
    )


GPU_VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "float32": {"dtype": "float32", "cache_dtype": "float32"},
    "reference": {"kernels": "reference"},
    "fp8": {"kv_dtype": "float8_e4m3fn"},
}


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs XLA's CUDA plugin")
@pytest.mark.parametrize("variant", GPU_VARIANTS)
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_family_compiled_for_a_gpu(family: str, variant: str) -> None:
    check_temporaries(TINY_CONFIGS[family], abstract_gpu_mesh(), fresh_attention="paged", **GPU_VARIANTS[variant])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-0.6b", "lfm2-1.2b", "gemma3-270m"])
def test_published_sizes_on_a_gpu(shape: str) -> None:
    """A few layers of models as they are published, on the device that compiles them."""
    if jax.default_backend() == "cpu":
        pytest.skip("no CUDA device")
    config = shortened(SHAPES[shape], 6)
    check_temporaries(
        config,
        build_mesh(RunnerOptions()),
        decode_sequences=(1, 32),
        prefill_tokens=(512, 2048),
        max_sequences=32,
        max_context_tokens=4096,
    )
