"""Grouped-query attention with rotary positions: one fused input product, one output product."""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx

from resin.models.assemblies import JoinedHeads, Sections, Transposed
from resin.models.axes import Axis
from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.declare import BIAS, Placement, declare
from resin.models.forward import Pass
from resin.models.linear import Linear
from resin.models.norm import HeadsNorm, NormOrder, RMSNorm
from resin.models.ops.protocol import HeadOperands
from resin.models.rope import Rope


class Attention(nnx.Module):
    """q, k, v (normalised per head if asked), rotation, attention over the cache, output product.

    Args:
        placement: dtype and mesh.
        name: checkpoint prefix, for example "model.layers.0.self_attn".
        hidden: width of the residual stream.
        heads: query heads over all devices.
        kv_heads: KV heads of the model; copied when tp exceeds them.
        entries: where the cache keeps this layer's keys, then its values; a row for each KV head of one device.
        how: scale and mask of the scores.
        rope: rotation of queries and keys.
        qk_norm_eps: normalise each query and key head before the rotation; None for no norms.
        heads_norm: what normalises all query heads of a token instead, and all key heads.
        norm_order, norm_one_plus: of these norms.
        qkv_bias, output_bias: add a bias to the products of queries, keys and values, and to the last product.
        sinks: one learned logit a head that only adds to the softmax's denominator.
        inputs: checkpoint names of the products of queries, keys and values, or of one that is all three.
        names: checkpoint names of the output product and of the query and key norms.
    """

    def __init__(
        self,
        placement: Placement,
        name: str,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        entries: PlaneRef,
        how: Attend,
        rope: Rope,
        qk_norm_eps: float | None = None,
        heads_norm: type[HeadsNorm] | None = None,
        norm_order: NormOrder = NormOrder.CAST_THEN_SCALE,
        norm_one_plus: bool = False,
        qkv_bias: bool = False,
        output_bias: bool = False,
        sinks: bool = False,
        inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        names: tuple[str, str, str] = ("o_proj", "q_norm", "k_norm"),
    ) -> None:
        width = entries.width
        output, q_norm, k_norm = (f"{name}.{part}" for part in names)
        placement.split("num_attention_heads", heads, Axis.HEADS)
        self.entries = entries
        self.how = how
        self.rope = rope
        each = JoinedHeads(kv_heads, heads // kv_heads, width, rope.lanes)
        rows = heads * width, kv_heads * width, kv_heads * width
        joined = each if len(inputs) == len(rows) else Sections(each, rows)
        shape = kv_heads, heads // kv_heads + 2, width
        self.qkv = Linear(
            placement,
            [f"{name}.{part}.weight" for part in inputs],
            (hidden, *shape),
            assembly=joined,
            axes=(None, Axis.KV, None, None),
        )
        self.output = Linear(
            placement, f"{output}.weight", (heads * width, hidden), assembly=Transposed(), axes=(Axis.HEADS, None)
        )
        biases = [f"{name}.{part}.bias" for part in inputs]
        self.qkv_bias = (
            declare(shape, placement, biases, assembly=joined, axes=(Axis.KV, None, None), inner=0, init=BIAS)
            if qkv_bias
            else None
        )
        self.output_bias = declare((hidden,), placement, f"{output}.bias", init=BIAS) if output_bias else None
        self.sinks = declare((heads,), placement, f"{name}.sinks", axes=(Axis.HEADS,), init=BIAS) if sinks else None

        def head_norm(part: str, count: int) -> RMSNorm | HeadsNorm | None:
            if qk_norm_eps is None:
                return None
            if heads_norm is None:
                return RMSNorm(placement, part, width, qk_norm_eps, norm_order, norm_one_plus, lanes=rope.lanes)
            assert not norm_one_plus, "no model has both"
            return heads_norm(placement, part, count, width, qk_norm_eps, norm_order, rope.lanes)

        self.q_norm, self.k_norm = head_norm(q_norm, heads), head_norm(k_norm, kv_heads)

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + attention(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("attention"):
            sinks = None if self.sinks is None else self.sinks[...]
            target = run.cache.target(self.entries, self.how, sinks)
            heads = run.ops.project_heads(x, self._qkv(run), run.rotation(self.rope), norm=norm, target=target)
            run.cache.append_heads(self.entries, heads)
            attended = run.cache.attend(heads.query, *self.entries.halves(), self.how, sinks=sinks)
            joined = attended.out.reshape(x.shape[0], -1)
            bias = None if self.output_bias is None else self.output_bias[...]
            return run.row_parallel(Axis.HEADS, joined, self.output.operand(), bias=bias, residual=residual)

    def _qkv(self, run: Pass) -> HeadOperands:
        norms = [
            partial(each, run.axes) if isinstance(each, HeadsNorm) else each
            for each in (self.q_norm, self.k_norm)
            if each is not None
        ]
        return HeadOperands(
            weight=self.qkv.operand(),
            bias=None if self.qkv_bias is None else self.qkv_bias[...].reshape(-1),
            norms=(norms[0], norms[1]) if norms else None,
            kv_heads=self.entries.rows // 2,
            width=self.entries.width,
        )
