"""The router of a mixture of experts in one kernel: which k of E experts each of few tokens takes, and their weights.

scores = rmsnorm(x) @ W + bias, with W `[D, E]`: one column block, as `dense_body` computes it, with D split over many
programs. The last one to arrive holds the scores `[T, E]` of every token in registers. It takes the largest k times,
notes at each expert which place it came to, and stores id and weight there: no sort, and no index into registers.

Maxima are of integers in the order of the floats, NaN the largest: a warp has an instruction for these. What is taken
lies below every float, so that ids are always distinct and inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.dense_body import ColumnBlock, Operands, ProductSpec, run_product
from resin.pallas_kernels.dense_tiles import DenseTiles, choose_route_tiles
from resin.pallas_kernels.draw import ordered
from resin.pallas_kernels.norms import normalise
from resin.pallas_kernels.tiles import MIN_ROWS, NOWHERE
from resin.plan import InvalidRequest

LOADED_VALUES = 16_384  # float32 sums that the last program asks for before it adds: at most 128 a thread
NAN_KEY, TAKEN = 2**31 - 1, -(2**31)  # above and below the integer of every float

Share = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class RouteRule:
    """How a router chooses by its scores, and weighs what it chose.

    Attributes:
        top_k: experts a token takes, those of the largest shares; equal ones take the lowest expert.
        share: what a score counts: its softmax over all experts or its sigmoid.
        renormalise: divide the weights by their sum; for a softmax that is the softmax over the chosen ones.
        scaling: factor on the weights.
        sum_eps: added to the sum that the weights of sigmoids are divided by.
    """

    top_k: int
    share: Share = "softmax"
    renormalise: bool = False
    scaling: float = 1.0
    sum_eps: float = 1e-6

    def check(self, experts: int, *, has_selection_bias: bool = False) -> None:
        """Refuses what no router can follow.

        Raises:
            InvalidRequest: fewer experts than it takes, a share of another name, or a bias of the choice that it knows
                no use for.
        """
        if not 1 <= self.top_k <= experts:
            raise InvalidRequest("top_k", self.top_k, f"1 to {experts}, the number of experts")
        if self.share not in get_args(Share):
            raise InvalidRequest("share", self.share, f"one of {get_args(Share)}")
        if has_selection_bias and self.share != "sigmoid":
            raise InvalidRequest("selection_bias", True, "None beside a softmax")


class NormedRows(NamedTuple):
    """The RMSNorm of `[T, D]` as `x * factor`: kernels apply the factor to the sums of their products.

    Attributes:
        x: `[T, D]`, weighted and rounded.
        factor: float32 `[T]`, 1 / rms of each row; None where x has it.
    """

    x: Any
    factor: Any = None

    def whole(self) -> jax.Array:
        """`[T, D]` in x's dtype."""
        if self.factor is None:
            return self.x
        return (self.x.astype(jnp.float32) * self.factor[:, None]).astype(self.x.dtype)


def route_tokens(
    x: jax.Array,
    gate: jax.Array,
    *,
    rule: RouteRule,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    bias: jax.Array | None = None,
    selection_bias: jax.Array | None = None,
    live: jax.Array | None = None,
    counters: jax.Array | None = None,
    tiles: DenseTiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, NormedRows, jax.Array | None]:
    """The experts of at most 64 tokens, and what these read.

    Args:
        x: `[T, D]`.
        gate: `[D, E]` in x's dtype.
        rule: how to choose and weigh.
        norm: `[D]` weight of the RMSNorm before the product; None for no norm.
        eps: added to the mean square.
        bias: `[E]` added to the scores.
        selection_bias: `[E]` added to sigmoids for the choice alone.
        live: int32 `[T]`, 0 for padding, which takes no expert; None for none of it.
        counters: int32 zeros, at least one, given back as zeros; None has XLA clear new ones.
        tiles: overrides the choice of tiles; all columns in one block.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        int32 `[T, k]` distinct experts, the largest share first, -1 for padding; float32 `[T, k]` weights, the
        normalised tokens and the counters.

    Raises:
        InvalidRequest: the rule cannot be followed, as `RouteRule.check` says.
    """
    rows, inner = x.shape
    experts = gate.shape[1]
    rule.check(experts, has_selection_bias=selection_bias is not None)
    spec = _Spec(
        rows=rows,
        inner=inner,
        columns=experts,
        has_norm=norm is not None,
        eps=eps,
        rule=rule,
        tiles=tiles or choose_route_tiles(rows, inner, experts),
        interpret=interpret,
    )
    assert spec.column_blocks == 1, spec.tiles
    shapes = tuple(jax.ShapeDtypeStruct((rows, rule.top_k), dtype) for dtype in (jnp.int32, jnp.float32))
    operands = Operands(x, gate, norm, _Extras(bias, selection_bias, live))
    (ids, weights, *normed), counters = run_product(spec, _finish, shapes, operands, counters)
    return ids, weights, NormedRows(*normed) if normed else NormedRows(x), counters


class _Extras(NamedTuple):
    """What the choice reads beside the scores."""

    bias: Any
    selection_bias: Any
    live: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec(ProductSpec):
    rule: RouteRule

    @property
    def name(self) -> str:
        return "route_tokens"

    @property
    def row_tile(self) -> int:
        """At least a row a warp: maxima of a row that lies across warps would wait for them."""
        least = self.tiles.num_warps if self.tiles.vector else MIN_ROWS
        return max(least, pl.next_power_of_2(self.rows))

    @property
    def keeps_norm(self) -> bool:
        return self.has_norm

    @property
    def part_rows(self) -> int:
        """Real ones only: one program reads them all."""
        return self.rows

    @property
    def shares_at_once(self) -> int:
        most = max(1, LOADED_VALUES // (self.row_tile * self.tiles.block_columns))
        return math.gcd(self.tiles.splits, 1 << (most.bit_length() - 1))


def _finish(spec: _Spec, block: ColumnBlock, sums, operands: Operands, results) -> None:
    """The choice of every token."""
    (ids_ref, weights_ref, *_), extras, rule = results, operands.extras, spec.rule
    (scores,) = sums
    row, real = jnp.arange(spec.row_tile, dtype=jnp.int32), block.inside

    def along_columns(ref):
        return plgpu.load(ref.at[block.column], mask=real, other=0).astype(jnp.float32)[None, :]

    if extras.bias is not None:
        scores = scores + along_columns(extras.bias)
    shares = ranked = jnp.where(real[None, :], scores, -jnp.inf)
    if rule.share == "sigmoid":
        shares = ranked = 1.0 / (1.0 + jnp.exp(-scores))
    else:
        shares = jnp.exp(scores - jnp.max(shares, axis=1)[:, None])
    if extras.selection_bias is not None:
        ranked = ranked + along_columns(extras.selection_bias)
    place = _places(ranked, block.column, real, rule.top_k)
    counted = place < rule.top_k if rule.renormalise else jnp.broadcast_to(real[None, :], place.shape)
    weights = shares
    if rule.renormalise or rule.share == "softmax":
        total = jnp.sum(jnp.where(counted, shares, 0.0), axis=1)
        weights = weights / (total + (rule.sum_eps if rule.share == "sigmoid" else 0.0))[:, None]
    if rule.scaling != 1.0:
        weights = weights * rule.scaling

    def store(ref, place, values):
        inside = (row < spec.rows)[:, None] & (place < rule.top_k)
        plgpu.store(ref.at[row[:, None], jnp.where(inside, place, NOWHERE)], values, mask=inside)

    store(weights_ref, place, weights)
    ids = jnp.broadcast_to(block.column[None, :], place.shape)
    if extras.live is not None:
        live = plgpu.load(extras.live.at[row], mask=row < spec.rows, other=0)
        ids = jnp.where((live > 0)[:, None], ids, -1)
    store(ids_ref, place, ids)


def _places(ranked: jax.Array, column: jax.Array, real: jax.Array, top_k: int) -> jax.Array:
    """int32 of `ranked`'s shape: 0 at the largest of each row, k - 1 at the k-th; k at all others."""
    key = jnp.where(ranked == ranked, ordered(ranked), NAN_KEY)

    def take(index, carry):
        left, place = carry
        best = left == jnp.max(left, axis=1)[:, None]
        taken = column[None, :] == jnp.min(jnp.where(best, column[None, :], NOWHERE), axis=1)[:, None]
        return jnp.where(taken, TAKEN, left), jnp.where(taken, index, place)

    left = jnp.where(real[None, :], key, TAKEN)
    _, place = lax.fori_loop(0, top_k, take, (left, jnp.full(left.shape, top_k, jnp.int32)))
    return place


def choose_experts(
    scores: jax.Array, rule: RouteRule, selection_bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The choice in plain XLA.

    Args:
        scores: float32 `[T, E]`.
        rule: how to choose and weigh.
        selection_bias: `[E]` added to sigmoids for the choice alone.

    Returns:
        int32 `[T, k]` experts, the largest share first, and float32 `[T, k]` weights.
    """
    shares = jax.nn.softmax(scores, axis=-1) if rule.share == "softmax" else jax.nn.sigmoid(scores)
    ranked = shares if rule.share == "sigmoid" else scores
    if selection_bias is not None:
        ranked = ranked + selection_bias.astype(jnp.float32)[None, :]
    _, experts = lax.top_k(ranked, rule.top_k)
    weights = jnp.take_along_axis(shares, experts, axis=-1)
    if rule.renormalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + (rule.sum_eps if rule.share == "sigmoid" else 0))
    return experts, weights * rule.scaling


def route_tokens_ref(
    x: jax.Array,
    gate: jax.Array,
    *,
    rule: RouteRule,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    bias: jax.Array | None = None,
    selection_bias: jax.Array | None = None,
    live: jax.Array | None = None,
    counters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, NormedRows, jax.Array | None]:
    """The same function in plain XLA. Arguments as in `route_tokens`."""
    rule.check(gate.shape[1], has_selection_bias=selection_bias is not None)
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x = normalise(x, norm, eps)
    scores = jnp.dot(x, gate, precision=exact, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)[None, :]
    experts, weights = choose_experts(scores, rule, selection_bias)
    if live is not None:
        experts = jnp.where((live > 0)[:, None], experts, -1)
    return experts, weights, NormedRows(x), counters
