"""From logits to tokens on the device: adjustments in the order of `SamplingParams`, the draw, logprobs.

B rows, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.pallas_kernels.draw import Draw
from resin.pallas_kernels.table import Kernels
from resin.plan import RowFlag
from resin.plan.layout import HEADER
from resin.plan.sampling import MAX_TOP_LOGPROBS
from resin.runtime.slots import MAX_COUNT, SlotTable

Columns = Mapping[str, jax.Array]

ADJUST = RowFlag.PENALTIES | RowFlag.BIAS | RowFlag.SUPPRESS_STOP | RowFlag.MASK


class Logprobs(NamedTuple):
    """float32 [N], int32 [N, 20], float32 [N, 20]: the chosen token's and the most likely ones', best first."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def sample(logits: jax.Array, columns: Columns, slots: SlotTable, masks: jax.Array, kernels: Kernels) -> jax.Array:
    """One token a row, or a RowFault where none can be chosen, int32 [B].

    Args:
        logits: float32 [B, V], raw.
        columns: the plan's columns.
        slots: device slot table.
        masks: int32 [B, ceil(V / 32)], read only if a row has MASK.
        kernels: draw the tokens.
    """
    flags = any_flags(columns)
    with jax.named_scope("sampling"):
        logits = lax.cond((flags & ADJUST) != 0, lambda x: _adjust(x, columns, slots, masks), lambda x: x, logits)
        return draw_tokens(logits, columns, kernels)


def draw_tokens(logits: jax.Array, columns: Columns, kernels: Kernels) -> jax.Array:
    """One token a row, or a RowFault, from adjusted logits, int32 [B]."""
    positions = columns["seq_lens"]
    return kernels.sample_tokens(
        logits, Draw(positions=positions, **{name: columns[name] for name in Draw._fields if name != "positions"})
    )


def any_flags(columns: Columns) -> jax.Array:
    """int32 [], the union of all rows' flags."""
    return columns["header"][HEADER.any_flags]


def has(columns: Columns, flag: RowFlag) -> jax.Array:
    """bool [B], rows with the flag."""
    return (columns["row_flags"] & flag) != 0


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
