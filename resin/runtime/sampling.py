"""From logits to tokens on the device: adjustments, cuts, the draw, logprobs. B rows, V tokens.

The order is that of `SamplingParams`. Each cut works on what the one before it left, with the probabilities of the
tokens that are left. Cuts are exact without a sort: a threshold is found bit by bit on integers that order as the
floats do, and equal logits at the threshold are admitted by token id, lowest first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.pallas_kernels.sampling import Draw, gumbel, row_keys, tempered, with_fault
from resin.pallas_kernels.sampling_general import finish_tokens
from resin.pallas_kernels.table import Backend, Kernels
from resin.plan import RowFlag
from resin.plan.sampling import MAX_TOP_LOGPROBS
from resin.runtime.slots import MAX_COUNT, SlotTable

Columns = Mapping[str, jax.Array]

ADJUST = RowFlag.PENALTIES | RowFlag.BIAS | RowFlag.SUPPRESS_STOP | RowFlag.MASK


class Logprobs(NamedTuple):
    """float32 [N], int32 [N, 20], float32 [N, 20]: the chosen token's and the most likely ones', best first."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def sample(
    logits: jax.Array, columns: Columns, slots: SlotTable, masks: jax.Array, kernels: Kernels | None = None
) -> jax.Array:
    """One token a row, or a RowFault where none can be chosen, int32 [B].

    Args:
        logits: float32 [B, V], raw.
        columns: the plan's columns.
        slots: device slot table.
        masks: int32 [B, ceil(V / 32)], read only if a row has MASK.
        kernels: draw the tokens, unless they are the references.
    """
    flags = any_flags(columns)
    with jax.named_scope("sampling"):
        logits = lax.cond((flags & ADJUST) != 0, lambda x: _adjust(x, columns, slots, masks), lambda x: x, logits)
        if kernels is not None and kernels.backend is not Backend.REFERENCE:
            return draw_tokens(logits, columns, kernels)
        greedy = first_argmax(logits)
        tokens = lax.cond(
            (flags & RowFlag.SAMPLE) != 0,
            lambda x: jnp.where(has(columns, RowFlag.SAMPLE), _draw(x, columns), greedy),
            lambda x: greedy,
            logits,
        )
        return with_fault(tokens, jnp.where(jnp.isnan(logits), jnp.inf, logits).max(axis=-1))


def draw_tokens(logits: jax.Array, columns: Columns, kernels: Kernels) -> jax.Array:
    """One token a row, or a RowFault, from adjusted logits, without branches on the host, int32 [B]."""
    draw = _kernel_draw(columns)
    tokens = kernels.sample_tokens(logits, draw)
    return finish_tokens(tokens, logits, draw, interpret=kernels.backend is Backend.INTERPRET)


def _kernel_draw(columns: Columns) -> Draw:
    """Rows without SAMPLE are greedy, rows without TRUNCATE whole."""
    cut = has(columns, RowFlag.TRUNCATE)
    return Draw(
        temperature=jnp.where(has(columns, RowFlag.SAMPLE), columns["temperature"], 0.0),
        top_k=jnp.where(cut, columns["top_k"], 0),
        top_p=jnp.where(cut, columns["top_p"], 1.0),
        min_p=jnp.where(cut, columns["min_p"], 0.0),
        seed_low=columns["seed_low"],
        seed_high=columns["seed_high"],
        positions=columns["seq_lens"],
    )


def any_flags(columns: Columns) -> jax.Array:
    """int32 [], the union of all rows' flags."""
    return columns["header"][2]


def has(columns: Columns, flag: RowFlag) -> jax.Array:
    """bool [B], rows with the flag."""
    return (columns["row_flags"] & flag) != 0


def first_argmax(values: jax.Array) -> jax.Array:
    """int32 [B], the lowest id among the largest values."""
    # Two passes must see the same numbers, not two fusions' versions of them.
    values = lax.optimization_barrier(values)
    top = values.max(axis=-1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == top, ids, values.shape[1] - 1), axis=-1)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Natural log probabilities under `[N, V]` float32 logits of `tokens` [N] and of the 20 most likely."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, top_ids = lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    short = MAX_TOP_LOGPROBS - top.shape[1]
    top, top_ids = jnp.pad(top, ((0, 0), (0, short)), constant_values=-jnp.inf), jnp.pad(top_ids, ((0, 0), (0, short)))
    return Logprobs(chosen - total, top_ids.astype(jnp.int32), top - total[:, None])


def no_logprobs(rows: int) -> Logprobs:
    """What a step without requested logprobs returns in their place."""
    shape = (rows, MAX_TOP_LOGPROBS)
    return Logprobs(jnp.zeros(rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def _adjust(logits: jax.Array, columns: Columns, slots: SlotTable, masks: jax.Array) -> jax.Array:
    flags = any_flags(columns)
    rows = columns["slots"]
    at = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def penalise(x: jax.Array) -> jax.Array:
        counts = slots.counts[rows].astype(jnp.int32)
        outputs = (counts & MAX_COUNT).astype(jnp.float32)
        repetition, frequency, presence = (
            columns[f"{name}_penalty"][:, None] for name in ("repetition", "frequency", "presence")
        )
        new = jnp.where(counts == 0, x, jnp.where(x > 0, x / repetition, x * repetition))
        new = new - frequency * outputs - jnp.where(outputs > 0, presence, 0.0)
        return jnp.where(has(columns, RowFlag.PENALTIES)[:, None], new, x)

    def bias(x: jax.Array) -> jax.Array:
        ids = jnp.where(has(columns, RowFlag.BIAS)[:, None], slots.bias_ids[rows], x.shape[1])
        return x.at[at, ids].add(slots.bias_values[rows], mode="drop")

    def mask(x: jax.Array) -> jax.Array:
        bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
        allowed = bits.reshape(x.shape[0], -1)[:, : x.shape[1]] != 0
        return jnp.where(allowed | ~has(columns, RowFlag.MASK)[:, None], x, -jnp.inf)

    def suppress(x: jax.Array) -> jax.Array:
        ids = jnp.where(has(columns, RowFlag.SUPPRESS_STOP)[:, None], slots.stop_ids[rows], x.shape[1])
        rest = x.at[at, ids].set(-jnp.inf, mode="drop")
        return jnp.where((rest > -jnp.inf).any(axis=-1, keepdims=True), rest, x)  # a stop where nothing else is left

    for flag, change in (
        (RowFlag.PENALTIES, penalise),
        (RowFlag.BIAS, bias),
        (RowFlag.MASK, mask),
        (RowFlag.SUPPRESS_STOP, suppress),
    ):
        logits = lax.cond((flags & flag) != 0, change, lambda x: x, logits)
    return logits


def _draw(logits: jax.Array, columns: Columns) -> jax.Array:
    temperature = jnp.where(has(columns, RowFlag.SAMPLE), columns["temperature"], 1.0)
    scaled = tempered(logits, temperature[:, None])
    scaled = lax.cond(
        (any_flags(columns) & RowFlag.TRUNCATE) != 0,
        lambda x: jnp.where(
            kept_tokens(x, columns["top_k"], columns["top_p"], columns["min_p"])
            | ~has(columns, RowFlag.TRUNCATE)[:, None],
            x,
            -jnp.inf,
        ),
        lambda x: x,
        scaled,
    )
    noise = gumbel_noise(columns["seed_low"], columns["seed_high"], columns["seq_lens"], logits.shape[1])
    return first_argmax(scaled + noise)


def gumbel_noise(seed_low: jax.Array, seed_high: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [B, V] standard Gumbel noise, a function of (seed, position, token) alone: the kernels' own."""
    keys = row_keys(seed_low, seed_high, positions)
    return gumbel(keys[:, None], jnp.arange(vocab_size, dtype=jnp.int32)[None, :])


def kept_tokens(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """bool [B, V], tokens that survive top_k (0 keeps all), then top_p, then min_p.

    Args:
        scaled: float32 [B, V], logits after the temperature.
        top_k, top_p, min_p: [B].
    """
    vocab_size = scaled.shape[1]
    keys = _ordered_keys(scaled)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    kept = lax.cond(
        jnp.any(wanted < vocab_size),
        lambda: _heaviest(keys, jnp.ones(scaled.shape, jnp.int32), wanted),
        lambda: jnp.ones(scaled.shape, jnp.bool_),
    )
    top = scaled.max(axis=-1, keepdims=True)
    mass = jnp.where(kept, jnp.exp(scaled - top), 0.0)
    kept &= lax.cond(
        jnp.any(top_p < 1),
        lambda: _heaviest(keys, mass, jnp.where(top_p < 1, top_p * mass.sum(-1), jnp.inf)),
        lambda: jnp.ones(scaled.shape, jnp.bool_),
    )
    return kept & (mass >= min_p[:, None])


def _ordered_keys(values: jax.Array) -> jax.Array:
    """uint32 that order as the floats do, -0.0 equal to 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 != 0, ~bits, bits | jnp.uint32(1 << 31))


def _heaviest(keys: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The shortest prefix in the order (key falling, id rising) whose weight reaches `target`; all if none does."""
    vocab_size = keys.shape[1]
    zero = jnp.zeros((), weights.dtype)

    def reaches(mask: jax.Array) -> jax.Array:
        return jnp.where(mask, weights, zero).sum(axis=-1) >= target

    def raise_threshold(step: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(reaches(keys >= higher[:, None]), higher, threshold)

    threshold = lax.fori_loop(0, 32, raise_threshold, jnp.zeros(keys.shape[0], jnp.uint32))[:, None]
    above, level = keys > threshold, keys == threshold
    ids = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    bits = vocab_size.bit_length()

    def raise_id(step: jax.Array, first_out: jax.Array) -> jax.Array:
        higher = first_out | (jnp.int32(1) << (bits - 1 - step))
        return jnp.where(reaches(above | (level & (ids < higher[:, None]))), first_out, higher)

    # Lowest-id ties: the largest bound whose tokens do not yet reach the target; the token at the bound completes it.
    bound = lax.cond(
        jnp.any(level.sum(axis=-1) > 1),
        lambda: lax.fori_loop(0, bits, raise_id, jnp.zeros(keys.shape[0], jnp.int32)),
        lambda: jnp.full(keys.shape[0], vocab_size, jnp.int32),
    )
    return above | (level & (ids <= bound[:, None]))
