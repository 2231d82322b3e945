"""What product kernels are held against: the operations in plain XLA, called as the kernels are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from resin.models.ops.protocol import ExpertOperands, Routed
from resin.models.ops.xla import XlaOps
from resin.models.rope import rotate
from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.heads import NewTokens, split_heads
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.norms import normalise
from resin.pallas_kernels.rope_append import append_rows
from resin.pallas_kernels.route import NormedRows

OPS = XlaOps()


def dense_small_ref(
    x: jax.Array, weight: jax.Array, *, norm: jax.Array | None = None, eps: float = 1e-6, **options: Any
) -> tuple[jax.Array, None]:
    """As `dense_small`; float32 sums, rounded once."""
    dtype, wide = x.dtype, {name: _wide(options.get(name)) for name in ("bias", "residual")}
    return OPS.linear(
        _wide(normalise(jnp.asarray(x), norm, eps)), _wide(weight), gate=options.get("gate"), **wide
    ).astype(dtype), None


def rope_append_ref(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    arena: jax.Array,
    append_pages: jax.Array,
    append_offsets: jax.Array,
    key_row: int,
    value_row: int,
    *,
    kv_heads: int,
    page_entries: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    fp8_scale: float | None = None,
    with_keys: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As `rope_append`; writes to page 0 as well."""
    query, key, value = split_heads(jnp.asarray(x), kv_heads)
    query, key = normalise(query, q_norm, eps), normalise(key, k_norm, eps)
    query, key = rotate(query, (cos, sin)), rotate(key, (cos, sin))
    arena = jnp.asarray(arena)
    for row, vectors in ((key_row, key), (value_row, value)):
        arena = append_rows(
            arena, vectors, append_pages, append_offsets, row, page_entries=page_entries, fp8_scale=fp8_scale
        )
    return query, arena, key if with_keys else None


def project_heads_ref(
    x: jax.Array,
    weight: jax.Array,
    new: NewTokens,
    arena: jax.Array,
    key_row: int,
    value_row: int,
    *,
    heads: int,
    kv_heads: int,
    page_entries: int,
    norm: jax.Array | None = None,
    bias: jax.Array | None = None,
    fp8_scale: float | None = None,
) -> tuple[jax.Array, jax.Array, None]:
    """As `project_heads`: one after the other."""
    joined, _ = dense_small_ref(x, weight, norm=norm, bias=bias)
    call = {"kv_heads": kv_heads, "page_entries": page_entries, "fp8_scale": fp8_scale}
    call |= {"q_norm": new.q_norm, "k_norm": new.k_norm}
    joined = joined.reshape(x.shape[0], heads + 2 * kv_heads, -1)
    return *rope_append_ref(joined, *new[:2], arena, *new[2:4], key_row, value_row, **call)[:2], None


def expert_ffn_ref(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: jax.Array | PackedMatrices,
    down: jax.Array | PackedMatrices,
    *,
    gate: Gate = SILU,
    biases: tuple[jax.Array, jax.Array] | None = None,
    factor: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """As `expert_ffn` and `packed_expert_ffn`; float32 sums, rounded once."""
    wide = jnp.asarray(x, jnp.float32)
    x_rows = NormedRows(wide if factor is None else wide * factor[:, None])
    matrices = (each if isinstance(each, PackedMatrices) else _wide(each) for each in (gate_up, down))
    operands = ExpertOperands(*matrices, gate, None if biases is None else (_wide(biases[0]), _wide(biases[1])))
    routed = Routed(x_rows, jnp.asarray(expert_ids), jnp.asarray(expert_weights))
    return OPS.experts(routed, operands, _wide(residual)).astype(x.dtype)


def _wide(array: Any) -> Any:
    return None if array is None else jnp.asarray(array, jnp.float32)
