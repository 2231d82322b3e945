"""The operations in plain XLA: what runs where a device has no kernels, and where a kernel does not fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from resin.models.cache.protocol import AppendTarget, Heads
from resin.models.norm import RMSNorm
from resin.models.ops.grouped import grouped_experts
from resin.models.ops.protocol import ExpertOperands, HeadOperands, Rotation, Routed
from resin.models.rope import rotate
from resin.pallas_kernels.gates import GateFunction
from resin.pallas_kernels.heads import split_heads
from resin.pallas_kernels.mxfp4 import PackedMatrices, unpack_matrices
from resin.pallas_kernels.route import NormedRows, RouteRule, route_tokens_ref


class XlaOps:
    """Every operation as a composition of XLA's. The methods are those of `Ops`."""

    def linear(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        gate: GateFunction | None = None,
        residual: jax.Array | None = None,
        out_dtype: str | None = None,
    ) -> jax.Array:
        out = jnp.matmul(x if norm is None else norm(x), weight, preferred_element_type=out_dtype)
        if bias is not None:
            out = out + bias.astype(out.dtype)[None, :]
        if gate is not None:
            out = gate(*jnp.split(out, 2, axis=-1))
        return out if residual is None else residual + out

    def project_heads(
        self,
        x: jax.Array,
        qkv: HeadOperands,
        rotation: Rotation,
        *,
        norm: RMSNorm | None = None,
        target: AppendTarget | None = None,
    ) -> Heads:
        return turn_heads(self.linear(x, qkv.weight, norm=norm, bias=qkv.bias), qkv, rotation)

    def route(
        self,
        x: jax.Array,
        gate: jax.Array,
        rule: RouteRule,
        *,
        live: jax.Array,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        selection_bias: jax.Array | None = None,
    ) -> Routed:
        x = x if norm is None else norm(x)
        experts, weights, *_ = route_tokens_ref(x, gate, rule=rule, bias=bias, selection_bias=selection_bias)
        return Routed(NormedRows(x), jnp.where(live[:, None], experts, -1), weights)

    def experts(self, routed: Routed, experts: ExpertOperands, residual: jax.Array | None = None) -> jax.Array:
        gate_up, down, gate, biases = experts

        def apply(expert: jax.Array, x: jax.Array) -> jax.Array:
            joined = _expert_product(gate_up, expert, x)
            if isinstance(gate_up, PackedMatrices):
                joined = joined.reshape(len(x), -1, 2, 8).swapaxes(1, 2).reshape(joined.shape)
            if biases is not None:
                joined = joined + biases[0][expert][None, :]
            out = _expert_product(down, expert, gate(*jnp.split(joined, 2, axis=-1)))
            return out if biases is None else out + biases[1][expert][None, :]

        out = grouped_experts(routed.x.whole(), routed.experts, routed.weights, experts.num_experts, apply)
        return out if residual is None else residual + out


def turn_heads(product: jax.Array, qkv: HeadOperands, rotation: Rotation) -> Heads:
    """Normalises and rotates the queries and keys of the QKV product."""
    joined = product.reshape(product.shape[0], -1, qkv.width)
    query, key, value = split_heads(joined, qkv.kv_heads)
    if qkv.norms is not None:
        query, key = qkv.norms[0](query), qkv.norms[1](key)
    return Heads(rotate(query, rotation), rotate(key, rotation), value)


def _expert_product(matrices: jax.Array | PackedMatrices, expert: jax.Array, x: jax.Array) -> jax.Array:
    """`[M, in]` times the matrix of one expert (int32 scalar): `[M, out]`."""
    if not isinstance(matrices, PackedMatrices):
        return x @ matrices[expert]
    one = PackedMatrices(*(part[expert] for part in matrices))
    return x @ unpack_matrices(one, x.shape[1], x.dtype).T
