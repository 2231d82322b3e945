"""Special rows: those whose logits are changed before the draw or reported after it. R special rows of B, V tokens.

They are gathered, worked on together without branches, and scattered back; the other rows of the batch do not notice.
What a row does not ask for leaves its logits as they are, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from resin.plan import RowFlag
from resin.plan.flags import SPECIAL
from resin.runtime.logprobs import Logprobs, no_logprobs, token_logprobs
from resin.runtime.slots import MAX_COUNT, SlotTable, count_outputs

Columns = Mapping[str, jax.Array]

# Special rows that the program for a few takes, and most rows of a batch that has none: adjusting and scoring all of 32
# rows of a vocabulary of 128k took 2.6 % of Llama-3.1-8B's step on an H200, up to 8 of them 1.7 %.
FEW_ROWS, FEW_OF_ROWS = 8, 32
# Masks travel in blocks of this many rows, so that one block of zeros stands for all masks that a plan lacks.
MASK_ROWS = 8


def special_counts(sequences: int) -> tuple[int, ...]:
    """Every R that a decode plan of B sequences may take, rising."""
    return (0, FEW_ROWS, sequences) if sequences > FEW_OF_ROWS else (0, sequences)


def mask_blocks(rows: int) -> int:
    """Blocks of masks that R rows take."""
    return -(-rows // MASK_ROWS)


class SpecialRows(NamedTuple):
    """R rows of a plan; beyond the special ones there are, rows that ask for nothing.

    Attributes:
        places: int32 [R], rising, B where there is no row.
        flags: int32 [R].
        slots: int32 [R], scratch where there is no row.
        penalties: repetition, frequency and presence, float32 [3, R, 1].
        first_mask: int32 [], masks of the plan that belong to rows before these B.
    """

    places: jax.Array
    flags: jax.Array
    slots: jax.Array
    penalties: jax.Array
    first_mask: jax.Array | int

    def has(self, flag: RowFlag) -> jax.Array:
        """bool [R, 1]."""
        return ((self.flags & flag) != 0)[:, None]

    def of(self, rows: jax.Array) -> jax.Array:
        """Those of `[B, ...]`; any where there is no row."""
        return rows if len(self.places) == len(rows) else rows.at[self.places].get(mode="clip")


def gather_rows(columns: Columns, slots: SlotTable, count: int, first_mask: jax.Array | int = 0) -> SpecialRows:
    """The first `count` special rows, or all rows where `count` is B.

    Args:
        columns: of B rows of the plan.
        slots: the device's.
        count: R, at least the special rows that there are.
        first_mask: as in `SpecialRows`.
    """
    flags = columns["row_flags"]
    rows = flags.shape[0]
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    places = jnp.arange(rows, dtype=jnp.int32)
    if count == rows:
        penalties = jnp.stack([columns[name] for name in names])[:, :, None]
        return SpecialRows(places, flags, columns["slots"], penalties, first_mask)
    places = jnp.sort(jnp.where((flags & SPECIAL) != 0, places, rows))[:count]

    def take(column: jax.Array, fill: int) -> jax.Array:
        return column.at[places].get(mode="fill", fill_value=fill)

    penalties = jnp.stack([take(columns[name], 0) for name in names])[:, :, None]
    scratch = slots.latest.shape[0] - 1
    return SpecialRows(places, take(flags, 0), take(columns["slots"], scratch), penalties, first_mask)


def adjust_rows(rows: SpecialRows, logits: jax.Array, *, slots: SlotTable, masks: Sequence[jax.Array]) -> jax.Array:
    """float32 [B, V]: the logits with those of the special rows penalised, biased, masked and kept from stopping.

    Args:
        rows: the special rows.
        logits: float32 [B, V], raw.
        slots: the device's.
        masks: int32 [MASK_ROWS, ceil(V / 32)] each: those of the rows with MASK, one after another.
    """
    penalised = _penalise(rows.of(logits), rows, slots)
    adjusted = _suppress(_mask(_bias(penalised, rows, slots), rows, masks), rows, slots)
    if len(adjusted) == len(logits):
        return adjusted
    return logits.at[rows.places].set(adjusted, mode="drop")


def _penalise(x: jax.Array, rows: SpecialRows, slots: SlotTable) -> jax.Array:
    counts = slots.counts[slots.count_row[rows.slots]].astype(jnp.int32)
    outputs = (counts & MAX_COUNT).astype(jnp.float32)
    repetition, frequency, presence = rows.penalties
    new = jnp.where(counts == 0, x, jnp.where(x > 0, x / repetition, x * repetition))
    new = new - frequency * outputs - jnp.where(outputs > 0, presence, 0.0)
    return jnp.where(rows.has(RowFlag.PENALTIES), new, x)


def _bias(x: jax.Array, rows: SpecialRows, slots: SlotTable) -> jax.Array:
    ids = jnp.where(rows.has(RowFlag.BIAS), slots.bias_ids[rows.slots], x.shape[1])
    return x.at[_lines(x), ids].add(slots.bias_values[rows.slots], mode="drop")


def _mask(x: jax.Array, rows: SpecialRows, masks: Sequence[jax.Array]) -> jax.Array:
    has_mask = rows.has(RowFlag.MASK)
    before = rows.first_mask + jnp.cumsum(has_mask[:, 0].astype(jnp.int32)) - 1  # without a mask, of anybody
    words = jnp.concatenate(masks)[jnp.maximum(before, 0)]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    allowed = bits.reshape(x.shape[0], -1)[:, : x.shape[1]] != 0
    return jnp.where(allowed | ~has_mask, x, -jnp.inf)


def _suppress(x: jax.Array, rows: SpecialRows, slots: SlotTable) -> jax.Array:
    ids = jnp.where(rows.has(RowFlag.SUPPRESS_STOP), slots.stop_ids[rows.slots], x.shape[1])
    rest = x.at[_lines(x), ids].set(-jnp.inf, mode="drop")
    return jnp.where((rest > -jnp.inf).any(axis=-1, keepdims=True), rest, x)  # a stop where nothing else is left


def _lines(x: jax.Array) -> jax.Array:
    return jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]


def count_tokens(rows: SpecialRows, counts: jax.Array, tokens: jax.Array, *, count_row: jax.Array) -> jax.Array:
    """The slots' counts with the tokens [B] of the rows that have penalties added."""
    chosen = jnp.maximum(rows.of(tokens), 0)
    counted = jnp.where((rows.flags & RowFlag.PENALTIES) != 0, count_row[rows.slots], counts.shape[0] - 1)
    return count_outputs(counts, counted, chosen)


def score_rows(rows: SpecialRows, logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Logprobs [B] of the tokens [B] of the special rows by raw logits [B, V]; zeros elsewhere."""
    out = token_logprobs(rows.of(logits), rows.of(tokens))
    if len(rows.places) == len(tokens):
        return out
    return jax.tree.map(lambda full, part: full.at[rows.places].set(part, mode="drop"), no_logprobs(len(tokens)), out)
