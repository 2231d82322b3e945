"""What a draw is: columns, noise, cuts, faults and the XLA reference, one definition for every way to sample.

Order and ties are those of `SamplingParams`: divide by the temperature, cut by top_k, then top_p, then min_p, each on
what the one before left, then draw by adding Gumbel noise; equal values rank by token id, lowest first. Cuts are exact
without a sort: a threshold is found bit by bit on integers that order as the floats do. B rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.plan import RowFault

SIGN = -(2**31)
MOST = float(jnp.finfo(jnp.float32).max)

Keep = Callable[[jax.Array, jax.Array], jax.Array]
"""Which tokens, bool, by their keys (`ordered`) and ids."""


class Draw(NamedTuple):
    """Per-row columns, all `[B]`. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing."""

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    seed_low: jax.Array  # int32
    seed_high: jax.Array  # int32
    positions: jax.Array  # int32, position of the token to draw


def is_cut(draw: Draw, vocab: int) -> jax.Array:
    """bool [B], rows of which top_k, top_p or min_p may drop a token; no greedy ones."""
    cuts = ((draw.top_k > 0) & (draw.top_k < vocab)) | (draw.top_p < 1) | (draw.min_p > 0)
    return cuts & (draw.temperature > 0)


def tempered(values: jax.Array, temperature: jax.Array) -> jax.Array:
    """Values over temperatures, those that were finite still so; +inf for NaN, which no maximum overlooks then."""
    values = jnp.where(values != values, jnp.inf, values)
    return jnp.where(jnp.abs(values) == jnp.inf, values, jnp.clip(values / temperature, -MOST, MOST))


def with_fault(token: jax.Array, top: jax.Array) -> jax.Array:
    """The token of a row whose largest value is `top`, or why it has none."""
    token = jnp.where(top == jnp.inf, jnp.int32(RowFault.NOT_FINITE), token)
    return jnp.where(top == -jnp.inf, jnp.int32(RowFault.NO_TOKEN), token)


def ordered(values: jax.Array) -> jax.Array:
    """int32 that order as the floats do, -0.0 equal to 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def threshold(weigh: Callable[[Keep], jax.Array], target: jax.Array) -> jax.Array:
    """The largest key whose tokens at or above it weigh at least `target`; the smallest key if none does."""

    def raise_bit(step: jax.Array, found: jax.Array) -> jax.Array:
        higher = found | lax.shift_left(jnp.int32(1), 31 - step)
        weight = weigh(lambda order, ids: order >= (higher ^ SIGN))
        return jnp.where(weight >= target, higher, found)

    return lax.fori_loop(0, 32, raise_bit, jnp.zeros(target.shape, jnp.int32)) ^ SIGN


def heaviest(
    weigh: Callable[[Keep], jax.Array], is_tied: Callable[[jax.Array], jax.Array], target: jax.Array, vocab: int
) -> Keep:
    """The shortest prefix in the order (key falling, id rising) that weighs `target`; all if none does.

    Args:
        weigh: weight of the tokens that a predicate keeps, of the shape of `target`: () in kernels, [B, 1] for rows.
        is_tied: whether, in any row, several tokens have the key given.
        target: least weight.
        vocab: ids are below.
    """
    key = threshold(weigh, target)
    bits = vocab.bit_length()

    def raise_bit(step: jax.Array, bound: jax.Array) -> jax.Array:
        higher = bound | lax.shift_left(jnp.int32(1), bits - 1 - step)
        weight = weigh(lambda order, ids: (order > key) | ((order == key) & (ids < higher)))
        return jnp.where(weight >= target, bound, higher)

    # The largest bound whose tokens do not yet reach the target; the token at the bound completes it.
    tied = is_tied(key)
    bound = jnp.broadcast_to(jnp.where(tied, jnp.int32(0), jnp.int32(vocab)), target.shape)
    bound = lax.cond(tied, lambda start: lax.fori_loop(0, bits, raise_bit, start), lambda start: start, bound)
    return lambda order, ids: (order > key) | ((order == key) & (ids <= bound))


def row_keys(seed_low: jax.Array, seed_high: jax.Array, positions: jax.Array) -> jax.Array:
    """uint32 `[B]`, the noise key of each row: a function of (seed, position) alone."""
    key = _mix(seed_low.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    key = _mix(key ^ _mix(seed_high.astype(jnp.uint32) + jnp.uint32(0x7F4A7C15)))
    return _mix(key ^ _mix(positions.astype(jnp.uint32) + jnp.uint32(0x85EBCA77)))


def gumbel(key: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 standard Gumbel noise of token ids under a row's key (scalars or arrays that broadcast).

    Rounds of a 32-bit finaliser (the shifts and factors of MurmurHash3's): the same integers on every device and
    version. -log(-log1p(-u)) is exact where it matters, at small u.
    """
    bits = _mix(_mix(key ^ (ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))) + key)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def sample_tokens_ref(logits: jax.Array, draw: Draw) -> jax.Array:
    """One token a row in plain XLA. Branches skip what no row needs, which is free on CPU.

    Args:
        logits: float32 `[B, V]`.
        draw: how each row is drawn.

    Returns:
        int32 `[B]`; a RowFault where nothing can be chosen.
    """
    sampled = (draw.temperature > 0)[:, None]
    values = tempered(logits, jnp.where(sampled, draw.temperature[:, None], 1.0))
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]

    def noisy(values: jax.Array) -> jax.Array:
        cut = is_cut(draw, logits.shape[1])
        kept = lax.cond(cut.any(), lambda: kept_tokens(values, draw) | ~cut[:, None], lambda: values == values)
        noise = gumbel(row_keys(draw.seed_low, draw.seed_high, draw.positions)[:, None], ids)
        return jnp.where(sampled, jnp.where(kept, values, -jnp.inf) + noise, values)

    scores = lax.cond(sampled.any(), noisy, lambda values: values, values)
    # Two passes must see the same numbers, not two fusions' versions of them.
    scores = lax.optimization_barrier(scores)
    tokens = jnp.where(scores == scores.max(axis=1, keepdims=True), ids, logits.shape[1] - 1).min(axis=1)
    return with_fault(tokens, values.max(axis=1))


def kept_tokens(values: jax.Array, draw: Draw) -> jax.Array:
    """bool [B, V], tokens of `tempered` values that survive top_k (0 keeps all), then top_p, then min_p."""
    vocab = values.shape[1]
    order, ids = ordered(values), jnp.arange(vocab, dtype=jnp.int32)[None, :]
    all_tokens = jnp.ones(values.shape, jnp.bool_)

    def cut(weights: jax.Array, target: jax.Array) -> jax.Array:
        def weigh(keep: Keep) -> jax.Array:
            return jnp.where(keep(order, ids), weights, 0).sum(axis=1, keepdims=True)

        keep = heaviest(weigh, lambda key: ((order == key).sum(axis=1) > 1).any(), target[:, None], vocab)
        return keep(order, ids)

    wanted = jnp.where(draw.top_k > 0, jnp.minimum(draw.top_k, vocab), vocab)
    kept = lax.cond((wanted < vocab).any(), lambda: cut(all_tokens.astype(jnp.int32), wanted), lambda: all_tokens)
    mass = jnp.where(kept, jnp.exp(values - values.max(axis=1, keepdims=True)), 0.0)
    share = jnp.where(draw.top_p < 1, draw.top_p * mass.sum(axis=1), jnp.inf)
    kept &= lax.cond((draw.top_p < 1).any(), lambda: cut(mass, share), lambda: all_tokens)
    return kept & (mass >= draw.min_p[:, None])
