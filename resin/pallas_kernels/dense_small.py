"""Dense products of few rows (M <= 128) with a normalisation before and bias, gate and residual after.

y = residual + f(rmsnorm(x) @ W + b), with W `[K, N]` read once, as `dense_body` says. A gated pair reads
the gate columns `[:, :N/2]` and the up columns `[:, N/2:]` of one fused weight in the same program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.dense_body import ColumnBlock, Operands, ProductSpec, add_bias, run_product
from resin.pallas_kernels.dense_tiles import DenseTiles, choose_dense_tiles
from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.gpu import H200, Gpu


def dense_small(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    residual: jax.Array | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    counters: jax.Array | None = None,
    gpu: Gpu = H200,
    tiles: DenseTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """`residual + gate(rmsnorm(x) @ weight + bias)` for at most 128 rows.

    Args:
        x: `[M, K]`.
        weight: `[K, N]` in x's dtype; with `gate`, gate columns then up columns.
        norm: `[K]` weight of the RMSNorm before the product; None for no norm.
        eps: added to the mean square.
        bias: `[N]` added to the product; None for none.
        gate: joins the gate half with the up half: the result is `[M, N / 2]`.
        residual: `[M, N]` or, gated, `[M, N / 2]`, added to the result.
        out_dtype: dtype of the result; None for x's.
        counters: int32 zeros, at least one a column block, given back as zeros; None has XLA clear new ones.
        gpu: what tiles are chosen for.
        tiles: overrides the choice of tiles.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[M, N]` or, gated, `[M, N / 2]`, and the counters.
    """
    rows, inner = x.shape
    columns = weight.shape[1] // (2 if gate else 1)
    spec = _Spec(
        rows=rows,
        inner=inner,
        columns=columns,
        has_norm=norm is not None,
        eps=eps,
        gate=gate,
        tiles=tiles or choose_dense_tiles(rows, inner, columns, gpu, gated=gate is not None),
        interpret=interpret,
    )
    shape = jax.ShapeDtypeStruct((rows, columns), jnp.dtype(out_dtype or x.dtype))
    (out,), counters = run_product(
        spec, _finish, (shape,), Operands(x, weight, norm, _Extras(bias, residual)), counters
    )
    return out, counters


class _Extras(NamedTuple):
    """What the finish reads beside the product."""

    bias: Any
    residual: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec(ProductSpec):
    gate: Gate | None

    @property
    def name(self) -> str:
        return "dense_small"

    @property
    def parts(self) -> int:
        """Gate and up, or one."""
        return 2 if self.gate else 1


def _finish(spec: _Spec, block: ColumnBlock, sums, operands: Operands, results) -> None:
    """Bias, gate, residual, store."""
    (out_ref,), (bias_ref, residual_ref) = results, operands.extras
    if bias_ref is not None:
        sums = add_bias(sums, bias_ref, block, spec)
    out = sums[0] if spec.gate is None else spec.gate(sums[0], sums[1])
    row = jnp.arange(spec.row_tile, dtype=jnp.int32)
    inside = (row < spec.rows)[:, None] & block.inside[None, :]
    at = (row[:, None], block.column[None, :])
    if residual_ref is not None:
        out = out + plgpu.load(residual_ref.at[at], mask=inside, other=0).astype(jnp.float32)
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=inside)
