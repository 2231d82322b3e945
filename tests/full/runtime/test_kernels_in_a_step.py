"""The kernels inside a whole step: the same model with the Triton bodies (interpreted) and with plain XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from resin.models.families import find_model_class
from resin.models.testing import TINY_CONFIGS
from resin.pallas_kernels.table import Backend
from resin.plan import ArenaSpec, Bucket, Phase, SamplingParams, plan_layout
from resin.runtime.executable import run_step
from resin.runtime.load import build_spec
from resin.runtime.mesh import build_mesh
from resin.runtime.program_kind import ProgramKind
from tests.runtime.tiny_runner import build_tiny, builder_for, tiny_options

LFM2_MOE_LAYERS = TINY_CONFIGS["lfm2_moe"]["num_hidden_layers"] - TINY_CONFIGS["lfm2_moe"]["num_dense_layers"]
LOGPROBS = SamplingParams(temperature=0, logprobs=5)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        pytest.param("llama", None, marks=pytest.mark.slow),
        # Attention is that of qwen3_moe, products are those beside 8-bit values.
        pytest.param("qwen3", None, marks=pytest.mark.slow),
        ("qwen3", "float8_e4m3fn"),
        ("qwen3_moe", None),
    ],
)
def test_interpreted_kernels_agree_with_the_references(family: str, kv_dtype: str | None) -> None:
    prompts = [np.random.default_rng(n).integers(3, 256, n).tolist() for n in (5, 17)]
    results = []
    for kernels in ("reference", "interpret"):
        runner = build_tiny(
            family,
            dtype="bfloat16",
            cache_dtype="bfloat16" if kv_dtype is None else "uint16",
            kv_dtype=kv_dtype,
            kernels=kernels,
            max_sequences=2,
            decode_sequences=(2,),
            prefill_tokens=(32,),
        )
        assert ("interpret" in str(runner._spec.kernels().paged_decode)) == (kernels == "interpret")
        builder = builder_for(runner)
        sequences = [builder.sequence(slot, prompt, LOGPROBS) for slot, prompt in enumerate(prompts)]
        output = runner.forward(builder.prefill([(sequence, len(sequence.tokens)) for sequence in sequences]))
        columns = [output]
        for _ in range(3):
            for sequence, prompt in zip(sequences, prompts, strict=True):
                sequence.tokens.append(prompt[len(sequence.tokens) % len(prompt)])
            columns.append(runner.forward(builder.decode(sequences, from_slot=False)))
        results.append(columns)
    for reference, interpreted in zip(*results, strict=True):
        assert reference.top_logprobs is not None and interpreted.top_logprobs is not None
        # Steps of bfloat16 at the size of the logits behind them.
        assert np.allclose(reference.top_logprobs, interpreted.top_logprobs, rtol=0.015, atol=0.05)
        clear = reference.top_logprobs[:, 0] - reference.top_logprobs[:, 1] > 0.2
        assert np.array_equal(reference.token_ids[clear], interpreted.token_ids[clear])


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all operations in order, with those that they hold; a kernel has a name of its own, and holds none."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params["name"])
            continue
        yield equation.primitive.name
        held = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns"))
        for inner in (value for value in held if hasattr(value, "eqns")):
            yield from primitives(inner)


PRODUCTS = ("grouped_product",) * 2
PACKED = ("sort_rows", "experts_mxfp4", "experts_mxfp4")


def decode_steps(family: str) -> Iterator[tuple[Bucket, list[str]]]:
    """Each decode bucket of the tiny model, and the operations of its plain program."""
    config = TINY_CONFIGS[family]
    model_class = find_model_class(config)
    options = tiny_options(dtype="bfloat16", cache_dtype="bfloat16")
    spec = build_spec(model_class, model_class.Config.from_hf(config), options, build_mesh(options))
    spec = dataclasses.replace(spec, backend=Backend.INTERPRET)
    for bucket in (bucket for bucket in spec.config.buckets if bucket.phase is Phase.DECODE):
        layout = plan_layout(bucket, spec.config.groups, spec.config.geometry)

        def step(weights, arena, slots, buffer, masks, bucket=bucket, layout=layout):
            return run_step(spec, bucket, layout, weights, arena, slots, buffer, masks, ProgramKind.PLAIN)

        arena = ArenaSpec(8, spec.config.geometry.page_bytes, spec.config.arena_dtype)
        yield bucket, list(primitives(jax.make_jaxpr(step)(*spec.arguments(bucket, arena, ProgramKind.PLAIN)).jaxpr))


@pytest.mark.parametrize(
    ("family", "products"),
    [
        # Norm, gate and (where nothing follows the product) residual are inside.
        ("llama", ("project_heads", "paged_decode", "dense_small", "dense_small", "dense_small")),
        ("gemma3_text", ("project_heads", "paged_decode", "dense_small", "dense_small", "dense_small")),
    ],
)
def test_a_decode_layer_is_four_products_and_attention(family: str, products: tuple[str, ...]) -> None:
    layers = TINY_CONFIGS[family]["num_hidden_layers"]
    for bucket, names in decode_steps(family):
        kernels = [name for name in names if name in products]
        assert kernels == [*list(products) * layers, "dense_small"], bucket


@pytest.mark.parametrize(
    ("family", "layers", "products"),
    [("qwen3_moe", 2, PRODUCTS), ("lfm2_moe", LFM2_MOE_LAYERS, PRODUCTS), ("gpt_oss", 4, PACKED)],
)
def test_a_decode_layer_of_experts_is_a_router_and_two_products(
    family: str, layers: int, products: tuple[str, ...]
) -> None:
    """The sum over the choices and the residual are XLA's, which sorts nothing; packed experts have rows by expert."""
    for bucket, names in decode_steps(family):
        kernels = [name for name in names if name in ("route_tokens", *PRODUCTS, *PACKED)]
        expected = [name for name in products if name != "sort_rows" or bucket.sequences > 1]
        assert kernels == ["route_tokens", *expected] * layers
        assert "top_k" not in names and "sort" not in names
