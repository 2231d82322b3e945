"""Steps of large models over eight GPUs, lowered for CUDA on any machine: what they call, and what a device holds."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from bench.shapes import SHAPES
from resin.models.families import find_model_class
from resin.models.weights import AbstractModel
from resin.pallas_kernels.table import Backend
from resin.plan import ArenaSpec, Phase
from resin.runtime import RunnerOptions
from resin.runtime.executable import StepSpec, mapped_step
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh
from resin.runtime.program_kind import ProgramKind
from tests.pallas_kernels.cuda_lowering import NVIDIA, _walk

LAYERS = 2
QWEN3_235B: dict[str, Any] = {
    **SHAPES["qwen3-30b-a3b"],
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(SHAPES["llama-3.1-8b"]),
    "gpt-oss-120b": dict(SHAPES["gpt-oss-120b"]),
    "qwen3-235b-a3b": QWEN3_235B,
}
# GB of weights in all.
WHOLE_GB = {"llama-3.1-8b": 16.1, "gpt-oss-120b": 65.0, "qwen3-235b-a3b": 470.0}


def shortened(name: str) -> dict[str, Any]:
    config = CONFIGS[name] | {"num_hidden_layers": LAYERS}
    return config | ({"layer_types": config["layer_types"][:LAYERS]} if "layer_types" in config else {})


def spec_of(config: dict[str, Any], dp: int, tp: int) -> StepSpec:
    model_class = find_model_class(config)
    options = RunnerOptions(
        dp=dp,
        tp=tp,
        dtype="bfloat16",
        cache_dtype="bfloat16",
        max_sequences=32,
        max_context_tokens=4096,
        decode_sequences=(32,),
        prefill_tokens=(256,),
    )
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, build_mesh(options))
    return dataclasses.replace(spec, backend=Backend.TRITON, has_fresh_prefill=False)


def operations(spec: StepSpec, phase: Phase) -> Counter[str]:
    """StableHLO operations of a bucket's plain program, by name, lowered for an H200."""
    (bucket,) = spec.config.of_phase(phase)
    arena = ArenaSpec(64, spec.config.geometry.page_bytes, spec.config.arena_dtype)
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.arguments(bucket, arena, ProgramKind.PLAIN)
    )
    types = (AxisType.Auto,) * len(spec.mesh.shape)
    names, sizes = tuple(spec.mesh.shape), tuple(spec.mesh.shape.values())
    try:
        from jax.sharding import AbstractDevice

        mesh = AbstractMesh(sizes, names, axis_types=types, abstract_device=AbstractDevice(*NVIDIA[90], "gpu"))
    except ImportError:  # jax 0.10 lowers without a device
        mesh = AbstractMesh(sizes, names, axis_types=types)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        step = jax.jit(mapped_step(spec, bucket, ProgramKind.PLAIN, mesh))
        lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    return Counter(op.name.removeprefix("stablehlo.") for op in _walk(lowered.compiler_ir("stablehlo").operation))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_over_eight_gpus_lowers(name: str, phase: Phase) -> None:
    """A layer sums twice, the embedding once; logits are traded once, and tokens gathered once."""
    found = operations(spec_of(shortened(name), 1, 8), phase)
    assert found["all_reduce"] == 1 + 2 * LAYERS
    assert (found["all_to_all"], found["all_gather"], found["reduce_scatter"]) == (1, 1, 0)
    assert found["custom_call"] >= 3 * LAYERS


def test_experts_over_replicas_lower() -> None:
    """Rows, ids and weights of all replicas come in, sums go out: of every layer, as all of them have experts."""
    found = operations(spec_of(shortened("qwen3-235b-a3b"), 2, 4), Phase.DECODE)
    assert found["reduce_scatter"] == LAYERS and found["all_reduce"] == 1 + 2 * LAYERS
    assert LAYERS * 3 <= found["all_gather"] - 1 <= LAYERS * 4  # kernels hand on the factor of the norm as well


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_device(name: str) -> None:
    spec = spec_of(CONFIGS[name], 1, 8)
    model: AbstractModel = spec.model
    whole, held = model.nbytes / 1e9, model.device_nbytes(spec.mesh) / 1e9
    print(f"{name}: {whole:.1f} GB of weights, {held:.2f} GB on each of 8 devices")
    assert whole == pytest.approx(WHOLE_GB[name], rel=0.05)
    assert whole / 8 <= held <= 1.1 * whole / 8
