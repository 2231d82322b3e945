"""The forward pass of a plan: many sequences packed, keys and values in the arena's pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from resin.models.context import AttentionLayer, Context, ExpertOperands, Routed, ShiftLayer
from resin.models.norm import RMSNorm
from resin.models.planes import PlaneRows, check_plane, first_row, plane_rows
from resin.models.rope import Rope
from resin.models.routers import Router
from resin.models.shift import shift_chunks
from resin.pallas_kernels.fp8 import pack_fp8
from resin.pallas_kernels.fresh_prefill import fits_fresh_prefill
from resin.pallas_kernels.gates import Gate, GateFunction
from resin.pallas_kernels.heads import NewTokens
from resin.pallas_kernels.mxfp4 import PackedMatrices
from resin.pallas_kernels.table import (
    Backend,
    Kernels,
    pick_kernels,
    takes_dense_kernel,
    takes_heads_kernel,
    takes_route_kernel,
)
from resin.pallas_kernels.tiles import to_arena
from resin.plan import (
    CacheGeometry,
    CacheGroup,
    HistoryGroup,
    InvalidRequest,
    Phase,
    RowFlag,
)
from resin.plan.layout import HEADER


class PagedContext(Context):
    """A plan's columns, unpacked, and the arena as it changes from layer to layer.

    A fresh plan is one sequence from its start: its tokens are all the keys there are, so that layers whose options
    allow it attend to them directly. The arena gets them for the steps that follow.

    Attributes:
        phase: prefill or decode (one token a sequence).
        columns: the plan's columns by name, as `plan_layout` names them.
        arena: [num_pages, page_elements]; replaced by each write.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        columns: Mapping[str, jax.Array],
        arena: jax.Array,
        groups: Sequence[CacheGroup],
        geometry: CacheGeometry,
        token_ids: jax.Array,
        tp: int = 1,
        kernels: Kernels | None = None,
        is_fresh: bool = False,
    ) -> None:
        super().__init__(token_ids, columns["positions"], tp)
        self.phase = phase
        self.columns = columns
        self.arena = arena
        self._groups = {group.name: (group, fill) for group, fill in zip(groups, geometry.groups, strict=True)}
        self._kernels = kernels or pick_kernels("cpu")
        self._is_reference = self._kernels.backend is Backend.REFERENCE
        self._fresh_prefill = self._kernels.fresh_prefill if is_fresh else None
        self._counters: dict[str, jax.Array] = {}

    def plane_rows(self, group_name: str, plane_name: str) -> PlaneRows:
        """Where a plane lies.

        Raises:
            InvalidRequest: the model declared no such group or plane.
        """
        if group_name not in self._groups:
            raise InvalidRequest("group", group_name, f"one of {sorted(self._groups)}")
        group, fill = self._groups[group_name]
        return plane_rows(group, fill, plane_name, self.arena)

    def attend(
        self,
        layer: AttentionLayer,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        rows, key_row, _ = self._layer_rows(layer)
        self._append(layer, rows, key_row, jnp.concatenate([key, value], axis=1))
        if (fresh := self._fresh_kernel(layer, rows, query.dtype, sinks)) is not None:
            return fresh(query, key, value, scale=layer.scale)
        return self._attend_pages(layer, query, sinks)

    def attend_product(
        self,
        layer: AttentionLayer,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        rope: Rope,
        *,
        norm: RMSNorm | None,
        norms: tuple[RMSNorm, RMSNorm] | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        fits = self.phase is Phase.DECODE and takes_heads_kernel(x.shape[0], weight.size) and x.dtype == jnp.bfloat16
        if self._is_reference or not fits or not _kernels_take(norm, norms):
            return super().attend_product(layer, x, weight, bias, rope, norm=norm, norms=norms, sinks=sinks)
        rows, key_row, value_row = self._layer_rows(layer)
        joined = weight.shape[1] // layer.head_dim
        with jax.named_scope("heads"):
            weights = () if norms is None else tuple(each.weight[...] for each in norms)
            places = (self.columns[f"append_{part}:{layer.group}"] for part in ("pages", "offsets"))
            query, self.arena, counters = self._kernels.project_heads(
                x,
                weight,
                NewTokens(*self.rotation(rope), *places, *weights),
                self.arena,
                key_row,
                value_row,
                heads=joined - 2 * layer.kv_heads,
                kv_heads=layer.kv_heads,
                page_entries=rows.page_entries,
                **_norm_arguments(norm),
                bias=bias,
                head_eps=1e-6 if norms is None else norms[0].eps,
                fp8_scale=rows.fp8_scale,
                counters=self._zero_counters("dense", joined),
            )
            self._keep_counters("dense", counters)
        return self._attend_pages(layer, query, sinks)

    def attend_joined(
        self,
        layer: AttentionLayer,
        joined: jax.Array,
        rope: Rope,
        norms: tuple[RMSNorm, RMSNorm] | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        if self._is_reference or not _kernels_take(None, norms) or joined.dtype != jnp.bfloat16:
            return super().attend_joined(layer, joined, rope, norms, sinks)
        with jax.named_scope("append"):
            rows, key_row, value_row = self._layer_rows(layer)
            fresh = self._fresh_kernel(layer, rows, joined.dtype, sinks)
            cos, sin = self.rotation(rope)
            query, self.arena, key = self._kernels.rope_append(
                joined,
                cos,
                sin,
                self.arena,
                self.columns[f"append_pages:{layer.group}"],
                self.columns[f"append_offsets:{layer.group}"],
                key_row,
                value_row,
                kv_heads=layer.kv_heads,
                page_entries=rows.page_entries,
                q_norm=None if norms is None else norms[0].weight[...],
                k_norm=None if norms is None else norms[1].weight[...],
                eps=1e-6 if norms is None else norms[0].eps,
                fp8_scale=rows.fp8_scale,
                with_keys=fresh is not None,
            )
        if fresh is not None:
            return fresh(query, key, joined[:, -layer.kv_heads :], scale=layer.scale)
        return self._attend_pages(layer, query, sinks)

    def product(
        self,
        x: jax.Array,
        weight: jax.Array,
        *,
        norm: RMSNorm | None = None,
        bias: jax.Array | None = None,
        gate: GateFunction | None = None,
        residual: jax.Array | None = None,
        is_partial: bool = False,
        out_dtype: str | None = None,
    ) -> jax.Array:
        fits = takes_dense_kernel(x.shape[0], weight.size, is_gated=gate is not None, has_residual=residual is not None)
        fits = fits and x.dtype == jnp.bfloat16 and (gate is None or isinstance(gate, Gate)) and _kernels_take(norm)
        if self._is_reference or not fits or (is_partial and self.tp > 1):
            return super().product(
                x,
                weight,
                norm=norm,
                bias=bias,
                gate=gate,
                residual=residual,
                is_partial=is_partial,
                out_dtype=out_dtype,
            )
        out, counters = self._kernels.dense(
            x,
            weight,
            **_norm_arguments(norm),
            bias=bias,
            gate=gate,
            residual=residual,
            out_dtype=out_dtype,
            counters=self._zero_counters("dense", -(-weight.shape[1] // 16)),
        )
        self._keep_counters("dense", counters)
        return out

    def route(self, router: Router, x: jax.Array, norm: RMSNorm | None) -> Routed:
        tokens = x.shape[0]
        fits = takes_route_kernel(tokens, router.gate.shape[1]) and x.dtype == jnp.bfloat16
        fits = fits and _kernels_take(norm) and type(router) is Router
        if self._is_reference or not fits or self.tp > 1:
            return super().route(router, x, norm)
        experts, weights, normed, counters = self._kernels.route_tokens(
            x,
            router.gate[...],
            rule=router.rule,
            **_norm_arguments(norm),
            **router.biases(),
            live=None if tokens == 1 else self.columns["header"][HEADER.num_tokens][None],
            counters=self._zero_counters("dense", 1),
        )
        self._keep_counters("dense", counters)
        return Routed(normed, experts, weights)

    def mix_experts(
        self,
        routed: Routed,
        count: int,
        apply: Callable[[jax.Array, jax.Array], jax.Array],
        operands: ExpertOperands | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        (x, factor), experts, weights = routed
        if self._is_reference or operands is None or x.dtype != jnp.bfloat16 or self.tp > 1:
            return super().mix_experts(routed, count, apply, operands, residual)
        gate_up, down, gate, biases = operands
        is_packed = isinstance(gate_up, PackedMatrices)
        kernel = self._kernels.packed_expert_ffn if is_packed else self._kernels.expert_ffn
        return kernel(x, experts, weights, gate_up, down, gate=gate, biases=biases, factor=factor, residual=residual)

    def _zero_counters(self, kernel: str, least: int) -> jax.Array | None:
        """Zeros that a kernel's programs count in and leave as zeros; one array serves all layers."""
        if self._is_reference:
            return None
        held = self._counters.get(kernel)
        return held if held is not None and held.shape[0] >= least else jnp.zeros((least,), jnp.int32)

    def _keep_counters(self, kernel: str, counters: jax.Array | None) -> None:
        if counters is not None:
            self._counters[kernel] = counters

    def _layer_rows(self, layer: AttentionLayer) -> tuple[PlaneRows, int, int]:
        """The layer's plane, and the rows of its keys and of its values."""
        rows = self.plane_rows(layer.group, layer.plane)
        needed = (layer.index + 1) * 2 * layer.kv_heads
        check_plane(self._groups[layer.group][0], layer.plane, rows=needed, width=layer.head_dim)
        stride = layer.kv_heads * rows.page_entries
        key_row = rows.first_row + layer.index * 2 * stride
        return rows, key_row, key_row + stride

    def _fresh_kernel(
        self, layer: AttentionLayer, rows: PlaneRows, dtype: Any, sinks: jax.Array | None
    ) -> Callable[..., jax.Array] | None:
        """Attention of a fresh plan's tokens to themselves; None where the layer reads pages."""
        group, _ = self._groups[layer.group]
        fits = fits_fresh_prefill(
            dtype,
            layer.head_dim,
            window=layer.window,
            sinks=sinks,
            softcap=layer.softcap,
            fp8_scale=rows.fp8_scale,
        )
        sees_tokens = isinstance(group, HistoryGroup) and group.tokens_per_entry == 1
        return self._fresh_prefill if fits and sees_tokens else None

    def _attend_pages(self, layer: AttentionLayer, query: jax.Array, sinks: jax.Array | None) -> jax.Array:
        rows, key_row, value_row = self._layer_rows(layer)
        columns = self.columns
        shared: dict[str, Any] = {
            "kv_heads": layer.kv_heads,
            "page_entries": rows.page_entries,
            "scale": layer.scale,
            "window": layer.window,
            "sinks": sinks,
            "softcap": layer.softcap,
            "fp8_scale": rows.fp8_scale,
        }
        page_indptr, page_ids = columns[f"page_indptr:{layer.group}"], columns[f"page_ids:{layer.group}"]
        seq_lens, first_position = columns["seq_lens"], columns[f"first_position:{layer.group}"]
        if self.phase is Phase.DECODE:
            out, _, counters = self._kernels.paged_decode(
                query[:, None],
                self.arena,
                page_indptr,
                page_ids,
                seq_lens,
                first_position,
                key_row,
                value_row,
                counters=self._zero_counters("decode", query.shape[0] * layer.kv_heads),
                **shared,
            )
            self._keep_counters("decode", counters)
            return out[:, 0]
        out, _ = self._kernels.paged_prefill(
            query,
            self.arena,
            page_indptr,
            page_ids,
            columns["query_indptr"],
            seq_lens,
            first_position,
            key_row,
            value_row,
            **shared,
        )
        if self._fresh_prefill is None:
            return out
        # Padding is undefined here, and becomes keys and values of layers that read no pages: these have to be finite.
        return jnp.where(self.live_tokens()[:, None, None], out, 0)

    def live_tokens(self) -> jax.Array:
        return jnp.arange(self.token_ids.shape[0], dtype=jnp.int32) < self.columns["header"][HEADER.num_tokens]

    def recall(self, layer: ShiftLayer, x: jax.Array) -> list[jax.Array]:
        if layer.group not in self._groups:
            raise InvalidRequest("group", layer.group, f"one of {sorted(self._groups)}")
        group, _ = self._groups[layer.group]
        check_plane(group, layer.plane, rows=(layer.index + 1) * layer.taps, width=x.shape[-1])
        with jax.named_scope("recall"):
            held, self.arena = self._kernels.shift_state(
                x,
                self.arena,
                self.columns[f"input_pages:{layer.group}"],
                self.columns[f"output_pages:{layer.group}"],
                self.columns["query_indptr"],
                (self.columns["row_flags"] & RowFlag.FRESH_STATE) != 0,
                first_row(group, 1, layer.plane, self.arena.dtype) + layer.index * layer.taps,
                taps=layer.taps,
            )
            if self.phase is Phase.DECODE:
                return [held[:, age] for age in range(layer.taps)]
            return shift_chunks(held, x, self.columns["query_indptr"])

    def _append(self, layer: AttentionLayer, rows: PlaneRows, key_row: int, vectors: jax.Array) -> None:
        """Writes `[T, 2 K, D]` vectors, keys then values, to the tokens' append destinations."""
        with jax.named_scope("append"):
            pages = self.columns[f"append_pages:{layer.group}"]
            offsets = self.columns[f"append_offsets:{layer.group}"]
            heads = key_row + rows.page_entries * jnp.arange(2 * layer.kv_heads, dtype=jnp.int32)
            index = (pages * rows.rows_per_page + offsets)[:, None] + heads[None, :]
            if rows.fp8_scale is None:
                words = to_arena(vectors, self.arena.dtype)
            else:
                words = pack_fp8(vectors, self.arena.dtype, rows.fp8_scale)
            flat = self.arena.reshape(-1, words.shape[-1])
            flat = flat.at[index].set(words, mode="promise_in_bounds")
            self.arena = flat.reshape(self.arena.shape)


def _kernels_take(norm: RMSNorm | None, heads: tuple[RMSNorm, RMSNorm] | None = None) -> bool:
    """Whether kernels compute these norms: RMSNorm itself, whatever a subclass makes of it."""
    norms = [each for each in (norm, *(heads or ())) if each is not None]
    is_known = all(type(each) is RMSNorm for each in norms)
    return is_known and (heads is None or heads[0].eps == heads[1].eps)


def _norm_arguments(norm: RMSNorm | None) -> dict[str, Any]:
    """A kernel's arguments for the norm before its product."""
    return {} if norm is None else {"norm": norm.weight[...], "eps": norm.eps}
