"""What `python -m bench kernels` checks and times: inputs of one shape each, and the work that they cannot do without.

Shapes are those of Llama-3.1-8B, Qwen3-0.6B and Qwen3-30B-A3B; `small` replaces them by toy ones for the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resin.pallas_kernels.draw import Draw
from resin.pallas_kernels.gates import SILU
from resin.pallas_kernels.heads import NewTokens
from resin.pallas_kernels.mxfp4 import PackedMatrices, packed_shapes
from resin.pallas_kernels.route import RouteRule

BF16 = 2  # bytes


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call of one kernel.

    Attributes:
        kernel: field of `Kernels`.
        shape: what the result row calls it.
        call: `call(kernel_function, *arguments)`.
        arguments: arrays on the device.
        device_names: parts of the GPU's names of the kernels that count.
        nbytes, flops: work that the call cannot do without.
        tolerance: largest relative error (Frobenius) against the XLA reference.
        host_reference: compute the reference on the CPU, because XLA compiles it for minutes on a GPU.
    """

    kernel: str
    shape: str
    call: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    device_names: tuple[str, ...]
    nbytes: int
    flops: int
    tolerance: float = 1e-2
    host_reference: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shape: query heads, KV heads, head width, page entries, layers that share a page."""

    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    entries: int = 16
    layers: int = 32

    @property
    def page_elements(self) -> int:
        return self.layers * 2 * self.kv_heads * self.entries * self.width


LLAMA_8B = Heads()
TOY_HEADS = Heads(4, 2, 32, 4, 2)

DECODE_BATCHES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (4, 65536), (128, 4096))
PREFILL_BATCHES = ((1, 16384), (4, 2048))
# K, N of the weight, norm, gate, residual
PRODUCTS = {
    "8B qkv": (4096, 6144, True, False, False),
    "8B o": (4096, 4096, False, False, True),
    "8B gate-up": (4096, 28672, True, True, False),
    "8B down": (14336, 4096, False, False, True),
    "0.6B qkv": (1024, 4096, True, False, False),
    "0.6B gate-up": (1024, 6144, True, True, False),
}


def build_cases(small: bool) -> Iterator[KernelCase]:
    """Every case, built when its turn comes, so that one case's arrays are gone before the next one's come."""
    shape = TOY_HEADS if small else LLAMA_8B
    arena = build_arena(shape, 50 if small else 128 * 4096 // 16 + 200)
    for sequences, context in ((3, 21),) if small else DECODE_BATCHES:
        yield decode_case(shape, arena, sequences, context)
    for sequences, context in ((2, 24),) if small else PREFILL_BATCHES:
        yield prefill_case(shape, arena, sequences, context)
    for tokens in (3,) if small else (1, 8, 128, 8192):
        yield append_case(shape, arena[: min(arena.shape[0], max(200, tokens // shape.entries + 1))], tokens)
    del arena
    products = {"toy": (64, 96, True, True, False)} if small else PRODUCTS
    for name, product in products.items():
        for rows in (1, 8, 32):
            yield product_case(name, rows, *product)
    for rows in (3,) if small else (1, 8, 32, 64):
        yield heads_case(shape, rows, 64 if small else 4096)
    for tokens in (2,) if small else (1, 32):
        yield route_case(tokens, *((8, 2, 64) if small else (128, 8, 2048)))
    for tokens in (2,) if small else (1, 32, 4096):
        yield experts_case(tokens, *((8, 2, 64, 32) if small else (128, 8, 2048, 768)))
        yield packed_experts_case(tokens, *((8, 2, 64, 32) if small else (32, 4, 2880, 2880)))
    for rows, vocab in ((4, 3000),) if small else ((1, 200_000), (64, 200_000)):
        yield sampling_case(rows, vocab)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def build_arena(shape: Heads, pages: int) -> jax.Array:
    """Random pages; above 64 they repeat, which no kernel can notice."""
    few = normal(0, min(pages, 64), shape.page_elements)
    return jax.jit(lambda pages_of: pages_of[(jnp.arange(pages) * 37) % pages_of.shape[0]])(few)


def page_columns(shape: Heads, pages: int, sequences: int, context: int) -> tuple[jax.Array, ...]:
    """page_indptr, page_ids, seq_lens and first_position of equal sequences in shuffled pages."""
    each = -(-context // shape.entries)
    ids = np.random.default_rng(0).permutation(pages - 1)[: sequences * each] + 1
    columns = (np.arange(sequences + 1) * each, ids, np.full(sequences, context), np.zeros(sequences))
    return tuple(jnp.asarray(column, jnp.int32) for column in columns)


def attention_options(shape: Heads) -> dict[str, Any]:
    return {"kv_heads": shape.kv_heads, "page_entries": shape.entries, "scale": shape.width**-0.5}


def last_rows(shape: Heads) -> tuple[int, int]:
    """Key and value rows of the last layer: the far end of each page."""
    stride = shape.kv_heads * shape.entries
    return (2 * shape.layers - 2) * stride, (2 * shape.layers - 1) * stride


def decode_case(shape: Heads, arena: jax.Array, sequences: int, context: int) -> KernelCase:
    options = attention_options(shape)

    def call(function: Any, *arguments: jax.Array) -> jax.Array:
        out: jax.Array = function(*arguments, *last_rows(shape), **options)[0]
        return out

    columns = page_columns(shape, arena.shape[0], sequences, context)
    tokens = sequences * context
    return KernelCase(
        "paged_decode",
        f"{sequences} x {context}",
        call,
        (normal(1, sequences, 1, shape.heads, shape.width), arena, *columns),
        ("paged_decode",),
        tokens * 2 * shape.kv_heads * shape.width * BF16,
        tokens * 4 * shape.heads * shape.width,
    )


def prefill_case(shape: Heads, arena: jax.Array, sequences: int, context: int) -> KernelCase:
    options = attention_options(shape)
    page_indptr, page_ids, seq_lens, first = page_columns(shape, arena.shape[0], sequences, context)
    query_indptr = jnp.arange(sequences + 1, dtype=jnp.int32) * context
    tokens = sequences * context
    return KernelCase(
        "paged_prefill",
        f"{sequences} x {context}",
        lambda function, *arguments: function(*arguments, *last_rows(shape), **options)[0],
        (normal(1, tokens, shape.heads, shape.width), arena, page_indptr, page_ids, query_indptr, seq_lens, first),
        ("paged_prefill",),
        tokens * 2 * (shape.kv_heads + shape.heads) * shape.width * BF16,
        tokens * (context + 1) * 2 * shape.heads * shape.width,
    )


def append_case(shape: Heads, arena: jax.Array, tokens: int) -> KernelCase:
    joined = shape.heads + 2 * shape.kv_heads
    angles = jax.random.normal(jax.random.key(2), (tokens, shape.width // 2))
    places = (
        np.random.default_rng(0).permutation(arena.shape[0] * shape.entries - shape.entries)[:tokens] + shape.entries
    )
    pages, offsets = (jnp.asarray(part, jnp.int32) for part in divmod(places, shape.entries))
    norm = 1 + normal(3, shape.width)

    def call(function: Any, x: jax.Array, arena: jax.Array, norm: jax.Array) -> jax.Array:
        query, written, _ = function(
            x,
            jnp.cos(angles),
            jnp.sin(angles),
            arena,
            pages,
            offsets,
            *last_rows(shape),
            kv_heads=shape.kv_heads,
            page_entries=shape.entries,
            q_norm=norm,
            k_norm=norm,
        )
        rows = written.reshape(arena.shape[0], -1, shape.entries, shape.width)[pages, -2 * shape.kv_heads :, offsets]
        return jnp.concatenate([query, rows], axis=1)

    nbytes = 2 * tokens * joined * shape.width * BF16 + tokens * shape.width * 4
    return KernelCase(
        "rope_append",
        f"{tokens} tokens",
        call,
        (normal(1, tokens, joined, shape.width), arena, norm),
        ("rope_append",),
        nbytes,
        0,
    )


def product_case(name: str, rows: int, inner: int, columns: int, norm: bool, gate: bool, residual: bool) -> KernelCase:
    weight = normal(1, inner, columns) * inner**-0.5
    scale = 1 + normal(2, inner) / 8 if norm else None
    added = normal(3, rows, columns) if residual else None

    def call(function: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        out: jax.Array = function(x, weight, norm=scale, gate=SILU if gate else None, residual=added)[0]
        return out

    return KernelCase(
        "dense",
        f"{name}, {rows} rows",
        call,
        (normal(4, rows, inner), weight),
        ("dense_small",),
        weight.size * BF16,
        2 * rows * weight.size,
    )


def heads_case(shape: Heads, rows: int, inner: int) -> KernelCase:
    joined = shape.heads + 2 * shape.kv_heads
    weight, norm = normal(1, inner, joined * shape.width) * inner**-0.5, 1 + normal(2, inner) / 8
    angles = jax.random.normal(jax.random.key(3), (rows, shape.width // 2))
    places = jnp.arange(rows, dtype=jnp.int32)
    new = NewTokens(jnp.cos(angles), jnp.sin(angles), 1 + places, places % shape.entries)
    arena = build_arena(shape, rows + 2)

    def call(function: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        query, written, _ = function(
            x,
            weight,
            new,
            arena,
            *last_rows(shape),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            page_entries=shape.entries,
            norm=norm,
        )
        pages = written.reshape(arena.shape[0], -1, shape.entries, shape.width)
        held = pages[new.append_pages, -2 * shape.kv_heads :, new.append_offsets]
        return jnp.concatenate([query, held], axis=1)

    return KernelCase(
        "project_heads",
        f"8B qkv, {rows} rows",
        call,
        (normal(4, rows, inner), weight),
        ("project_heads",),
        weight.size * BF16,
        2 * rows * weight.size,
    )


def route_case(tokens: int, experts: int, choices: int, width: int) -> KernelCase:
    x, gate = normal(1, tokens, width), normal(2, width, experts) * width**-0.5
    norm, rule = 1 + normal(3, width) / 8, RouteRule(choices, renormalise=True)
    known = x.astype(jnp.float32) @ (norm[:, None] * gate).astype(jnp.float32)

    def call(function: Any, x: jax.Array, gate: jax.Array) -> jax.Array:
        ids, weights, *_ = function(x, gate, rule=rule, norm=norm)
        # Where two scores are as good as equal either may be taken, so ids count by the scores behind them.
        return jnp.concatenate([weights, jnp.take_along_axis(known, ids, axis=1)], axis=1)

    return KernelCase(
        "route_tokens",
        f"{tokens} tokens, {choices} of {experts} experts",
        call,
        (x, gate),
        ("route_tokens",),
        gate.size * BF16,
        2 * tokens * gate.size,
    )


def experts_case(tokens: int, experts: int, choices: int, width: int, inner: int) -> KernelCase:
    scores = jax.random.normal(jax.random.key(1), (tokens, experts))
    weights, ids = jax.lax.top_k(jax.nn.softmax(scores), choices)
    gate_up = normal(2, experts, width, 2 * inner) * width**-0.5
    down = normal(3, experts, inner, width) * inner**-0.5
    touched = len(np.unique(np.asarray(ids)))
    return KernelCase(
        "expert_ffn",
        f"{tokens} tokens, {touched} of {experts} experts",
        lambda function, *arguments: function(*arguments),
        (normal(4, tokens, width), ids.astype(jnp.int32), weights, gate_up, down),
        ("grouped_product",),
        touched * 3 * width * inner * BF16,
        tokens * choices * 6 * width * inner,
        tolerance=2e-2,
    )


def packed_experts_case(tokens: int, experts: int, choices: int, width: int, inner: int) -> KernelCase:
    scores = jax.random.normal(jax.random.key(1), (tokens, experts))
    weights, ids = jax.lax.top_k(jax.nn.softmax(scores), choices)
    gate_up, down = packed_matrices(2, experts, 2 * inner, width), packed_matrices(3, experts, width, inner)
    touched = len(np.unique(np.asarray(ids)))
    return KernelCase(
        "packed_expert_ffn",
        f"{tokens} tokens, {touched} of {experts} MXFP4 experts",
        lambda function, *arguments: function(*arguments),
        (normal(4, tokens, width), ids.astype(jnp.int32), weights, gate_up, down),
        ("experts_mxfp4",),
        int(touched * 3 * width * inner * (0.5 + 1 / 32)),
        tokens * choices * 6 * width * inner,
        tolerance=2e-2,
    )


def packed_matrices(seed: int, experts: int, rows: int, inner: int) -> PackedMatrices:
    """Random codes; outputs of about unit deviation."""
    words, factors, units = packed_shapes(experts, rows, inner)
    bits = jax.random.bits(jax.random.key(seed), words, jnp.uint32)
    byte = 253 - round(math.log2(2.93 * inner**0.5))
    same = np.full(factors, byte * 0x01010101, np.uint32).view(np.int32)
    return PackedMatrices(jax.lax.bitcast_convert_type(bits, jnp.int32), jnp.asarray(same), jnp.ones(units))


def sampling_case(rows: int, vocab: int) -> KernelCase:
    logits = jax.random.normal(jax.random.key(1), (rows, vocab)) * 3
    seeds = jnp.arange(rows, dtype=jnp.int32)
    draw = Draw(
        temperature=jnp.full(rows, 0.8, jnp.float32),
        top_k=jnp.full(rows, 50, jnp.int32),
        top_p=jnp.full(rows, 0.95, jnp.float32),
        min_p=jnp.zeros(rows, jnp.float32),
        seed_low=seeds,
        seed_high=seeds,
        positions=seeds,
    )
    return KernelCase(
        "sample_tokens",
        f"{rows} x {vocab}, top-k 50 and top-p",
        lambda function, *arguments: function(*arguments),
        (logits, draw),
        ("sampling_survey", "sampling_choose", "sampling_general"),
        logits.nbytes,
        0,
        tolerance=0.0,
        host_reference=True,  # many passes over the whole vocabulary
    )
