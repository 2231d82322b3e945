"""The operations as kernels, each where its shapes and types suit it, plain XLA elsewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from resin.models.cache.protocol import AppendTarget, Heads
from resin.models.norm import RMSNorm
from resin.models.ops.protocol import ExpertOperands, HeadOperands, Rotation, Routed
from resin.models.ops.xla import XlaOps, turn_heads
from resin.pallas_kernels.counters import Counters
from resin.pallas_kernels.gates import Gate, GateFunction
from resin.pallas_kernels.heads import NewTokens, split_heads
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.route import RouteRule
from resin.pallas_kernels.table import ProductKernels, takes_dense_kernel, takes_heads_kernel, takes_route_kernel


class TritonOps:
    """Kernels for what they compute: `RMSNorm` and `Gate` themselves, and never what a subclass makes of them.

    Args:
        kernels: of the device. One object serves one pass: kernels hand counters on from layer to layer.
    """

    def __init__(self, kernels: ProductKernels) -> None:
        self._kernels = kernels
        self._xla = XlaOps()
        self._counters = Counters()

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
        fits = takes_dense_kernel(x.shape[0], weight.size, is_gated=gate is not None, has_residual=residual is not None)
        fits = fits and x.dtype == jnp.bfloat16 and _is_known(norm) and (gate is None or type(gate) is Gate)
        if not fits:
            return self._xla.linear(x, weight, norm=norm, bias=bias, gate=gate, residual=residual, out_dtype=out_dtype)
        out, counters = self._kernels.dense(
            x,
            weight,
            **_norm_arguments(norm),
            bias=bias,
            gate=gate,
            residual=residual,
            out_dtype=out_dtype,
            counters=self._counters.take(-(-weight.shape[1] // 16)),
        )
        self._counters.give_back(counters)
        return out

    def project_heads(
        self,
        x: jax.Array,
        qkv: HeadOperands,
        rotation: Rotation,
        *,
        norm: RMSNorm | None = None,
        target: AppendTarget | None = None,
    ) -> Heads:
        if target is None or x.dtype != jnp.bfloat16 or not _are_known(qkv):
            return turn_heads(self.linear(x, qkv.weight, norm=norm, bias=qkv.bias), qkv, rotation)
        fits = takes_heads_kernel(x.shape[0], qkv.weight.size) and _is_known(norm)
        if fits and not target.wants_vectors:
            return self._project_and_append(x, qkv, rotation, norm, target)
        return self._append(self.linear(x, qkv.weight, norm=norm, bias=qkv.bias), qkv, rotation, target)

    def _project_and_append(
        self, x: jax.Array, qkv: HeadOperands, rotation: Rotation, norm: RMSNorm | None, target: AppendTarget
    ) -> Heads:
        joined = qkv.weight.shape[1] // qkv.width
        with jax.named_scope("heads"):
            weights = tuple(each.weight[...] for each in _rms_norms(qkv))
            query, arena, counters = self._kernels.project_heads(
                x,
                qkv.weight,
                NewTokens(*rotation, target.pages, target.offsets, *weights),
                target.arena,
                target.key_row,
                target.value_row,
                heads=joined - 2 * qkv.kv_heads,
                kv_heads=qkv.kv_heads,
                page_entries=target.page_entries,
                **_norm_arguments(norm),
                bias=qkv.bias,
                head_eps=_head_eps(qkv),
                fp8_scale=target.fp8_scale,
                counters=self._counters.take(joined),
            )
            self._counters.give_back(counters)
        return Heads(query, None, None, arena)

    def _append(self, product: jax.Array, qkv: HeadOperands, rotation: Rotation, target: AppendTarget) -> Heads:
        joined = product.reshape(product.shape[0], -1, qkv.width)
        q_norm, k_norm = (each.weight[...] for each in _rms_norms(qkv)) if qkv.norms is not None else (None, None)
        with jax.named_scope("append"):
            query, arena, key = self._kernels.rope_append(
                joined,
                *rotation,
                target.arena,
                target.pages,
                target.offsets,
                target.key_row,
                target.value_row,
                kv_heads=qkv.kv_heads,
                page_entries=target.page_entries,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=_head_eps(qkv),
                fp8_scale=target.fp8_scale,
                with_keys=target.wants_vectors,
            )
        return Heads(query, key, split_heads(joined, qkv.kv_heads)[2] if target.wants_vectors else None, arena)

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
        tokens = x.shape[0]
        if not takes_route_kernel(tokens, gate.shape[1]) or x.dtype != jnp.bfloat16 or not _is_known(norm):
            return self._xla.route(x, gate, rule, live=live, norm=norm, bias=bias, selection_bias=selection_bias)
        experts, weights, normed, counters = self._kernels.route_tokens(
            x,
            gate,
            rule=rule,
            **_norm_arguments(norm),
            bias=bias,
            selection_bias=selection_bias,
            live=None if tokens == 1 else live.astype(jnp.int32),
            counters=self._counters.take(1),
        )
        self._counters.give_back(counters)
        return Routed(normed, experts, weights)

    def experts(self, routed: Routed, experts: ExpertOperands, residual: jax.Array | None = None) -> jax.Array:
        (x, factor), ids, weights = routed
        gate_up, down, gate, biases = experts
        if x.dtype != jnp.bfloat16 or type(gate) is not Gate:
            return self._xla.experts(routed, experts, residual)
        is_packed = isinstance(gate_up, PackedMatrices)
        kernel = self._kernels.packed_expert_ffn if is_packed else self._kernels.expert_ffn
        return kernel(x, ids, weights, gate_up, down, gate=gate, biases=biases, factor=factor, residual=residual)


def _is_known(norm: RMSNorm | None) -> bool:
    """Whether kernels compute this norm: RMSNorm itself, whatever a subclass makes of it."""
    return norm is None or type(norm) is RMSNorm


def _are_known(qkv: HeadOperands) -> bool:
    """The same of the norms of heads, which share an epsilon."""
    norms = _rms_norms(qkv)
    return len(norms) == len(qkv.norms or ()) and all(map(_is_known, norms)) and len({each.eps for each in norms}) < 2


def _rms_norms(qkv: HeadOperands) -> tuple[RMSNorm, ...]:
    return tuple(each for each in qkv.norms or () if isinstance(each, RMSNorm))


def _norm_arguments(norm: RMSNorm | None) -> dict[str, Any]:
    """A kernel's arguments for the norm before its product."""
    return {} if norm is None else {"norm": norm.weight[...], "eps": norm.eps}


def _head_eps(qkv: HeadOperands) -> float:
    return next((each.eps for each in _rms_norms(qkv)), 1e-6)
