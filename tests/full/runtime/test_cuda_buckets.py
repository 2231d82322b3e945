"""Every bucket of the table that a server on a GPU has by default, lowered for CUDA."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from bench.shapes import SHAPES
from resin.models.families import find_model_class
from resin.pallas_kernels.table import Backend
from resin.plan import ArenaSpec, Bucket, Phase, plan_layout
from resin.runtime import RunnerOptions
from resin.runtime.bucket_table import decode_sizes, prefill_sizes
from resin.runtime.executable import StepSpec, run_step
from resin.runtime.load import DEFAULTS, build_spec
from resin.runtime.mesh import build_mesh
from resin.runtime.program_kind import ProgramKind
from tests.pallas_kernels.cuda_lowering import lower_for_cuda

ATTENTION = {Phase.DECODE: "paged_decode", Phase.PREFILL: "paged_prefill"}


def lowered_kernels(spec: StepSpec, bucket: Bucket) -> set[str]:
    """Names of the kernels in a bucket's plain program."""
    layout = plan_layout(bucket, spec.config.groups, spec.config.geometry)
    arena = ArenaSpec(64, spec.config.geometry.page_bytes, spec.config.arena_dtype)

    def step(weights, arena, slots, buffer, masks):
        return run_step(spec, bucket, layout, weights, arena, slots, buffer, masks, ProgramKind.PLAIN)

    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.arguments(bucket, arena, ProgramKind.PLAIN)
    )
    modules = lower_for_cuda(step, *arguments)
    assert all(module.ir.startswith(b"ML") for module in modules)
    return {module.name for module in modules}


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_every_bucket_lowers(shape: str) -> None:
    """One layer of the shape; more are the same kernels."""
    config = SHAPES[shape] | {"num_hidden_layers": 1}
    model_class = find_model_class(config)
    defaults = DEFAULTS["gpu"]
    options = RunnerOptions(
        dtype="bfloat16",
        cache_dtype="bfloat16",
        max_sequences=512,
        max_context_tokens=defaults["context"],
        decode_sequences=decode_sizes("gpu", 512),
        prefill_tokens=prefill_sizes("gpu", defaults["plan_tokens"]),
    )
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, build_mesh(options))
    spec = dataclasses.replace(spec, backend=Backend.TRITON, has_fresh_prefill=False)
    assert {bucket.phase for bucket in spec.config.buckets} == set(Phase)
    for bucket in spec.config.buckets:
        assert any(name.startswith(ATTENTION[bucket.phase]) for name in lowered_kernels(spec, bucket)), bucket
