"""The device slot table: what stays on the device for each running sequence between steps.

Token counts take V numbers a sequence, so only those with penalties have a row of them: the Engine hands the rows out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from resin.plan import RunnerConfig, SlotLoad
from resin.plan.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKENS
from resin.runtime.drafting import Drafter, Drafting, abstract_drafting

# A count holds the number of output occurrences, and in one bit whether the prompt holds the token.
PROMPT_BIT = 1 << 14
MAX_COUNT = PROMPT_BIT - 1
COUNT_DTYPE = np.dtype(np.int16)

# Tokens that one call of the load program takes; longer sequences take several.
LOAD_TOKENS = 2048


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SlotTable:
    """One row a slot; the last row is scratch for padded sequences. S slots, C rows of counts, V tokens.

    Attributes:
        latest: int32 [S + 1, 3], the token that the slot emitted last, the tokens of its sequence after its latest
            plan, and which copy of its States is true: how many drafts the plan kept.
        count_row: int32 [S + 1], the slot's row of `counts`.
        counts: int16 [C + 1, V], output occurrences and the prompt bit; the last row is scratch.
        bias_ids: int32 [S + 1, 320], V where unused.
        bias_values: float32 [S + 1, 320].
        stop_ids: int32 [S + 1, 16], V where unused.
        drafting: what may come next; None in a runner that drafts nothing.
    """

    latest: jax.Array
    count_row: jax.Array
    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    stop_ids: jax.Array
    drafting: Drafting | None = None


def abstract_slots(config: RunnerConfig, sharding: jax.sharding.Sharding, drafter: Drafter | None = None) -> SlotTable:
    """Shapes of a table."""
    rows = config.max_sequences + 1

    def shape(*sizes: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    return SlotTable(
        latest=shape(rows, 3),
        count_row=shape(rows),
        counts=shape(config.count_rows + 1, config.vocab_size, dtype=COUNT_DTYPE),
        bias_ids=shape(rows, MAX_LOGIT_BIAS),
        bias_values=shape(rows, MAX_LOGIT_BIAS, dtype=np.float32),
        stop_ids=shape(rows, MAX_STOP_TOKENS),
        drafting=None if drafter is None else abstract_drafting(drafter, config, sharding),
    )


@dataclass(frozen=True, slots=True)
class SlotLoadArrays:
    """Arguments of `load_slot` that a SlotLoad turns into; NumPy, of fixed sizes."""

    slot: np.ndarray  # int32 []
    count_row: np.ndarray  # int32 []
    tokens: np.ndarray  # int32 [LOAD_TOKENS], V where unused
    prompt: np.ndarray  # bool [LOAD_TOKENS]
    start: np.ndarray  # int32 [], position of the first of them
    bias_ids: np.ndarray  # int32 [320]
    bias_values: np.ndarray  # float32 [320]
    stop_ids: np.ndarray  # int32 [16]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(getattr(self, name) for name in self.__dataclass_fields__)


def load_arguments(load: SlotLoad, vocab_size: int) -> list[SlotLoadArrays]:
    """The calls of `load_slot` that one SlotLoad takes."""

    def padded(values: np.ndarray, size: int, fill: float, dtype: type) -> np.ndarray:
        out: np.ndarray = np.full(size, fill, dtype)
        out[: len(values)] = values
        return out

    token_ids = np.asarray(load.token_ids, np.int32)
    return [
        SlotLoadArrays(
            slot=np.asarray(load.slot, np.int32),
            count_row=np.asarray(load.count_row, np.int32),
            tokens=padded(token_ids[start : start + LOAD_TOKENS], LOAD_TOKENS, vocab_size, np.int32),
            prompt=np.arange(start, start + LOAD_TOKENS) < load.prompt_tokens,
            start=np.asarray(start, np.int32),
            bias_ids=padded(load.bias_ids, MAX_LOGIT_BIAS, vocab_size, np.int32),
            bias_values=padded(load.bias_values, MAX_LOGIT_BIAS, 0.0, np.float32),
            stop_ids=padded(load.stop_ids, MAX_STOP_TOKENS, vocab_size, np.int32),
        )
        for start in range(0, max(len(token_ids), 1), LOAD_TOKENS)
    ]


def load_slot(
    drafter: Drafter | None,
    slots: SlotTable,
    slot: jax.Array,
    count_row: jax.Array,
    tokens: jax.Array,
    prompt: jax.Array,
    start: jax.Array,
    bias_ids: jax.Array,
    bias_values: jax.Array,
    stop_ids: jax.Array,
) -> SlotTable:
    """Replaces what a slot holds (but its last token and length) by a request's tokens, bias and stop ids."""
    vocab_size, drafting = slots.counts.shape[1], slots.drafting
    held = lax.dynamic_slice(slots.counts, (count_row, 0), (1, vocab_size))[0].astype(jnp.int32)
    row = jnp.where(start == 0, 0, held)
    outputs = (row & MAX_COUNT).at[tokens].add(jnp.where(prompt, 0, 1), mode="drop")
    # Padding points past the vocabulary, so only real tokens set the bit.
    in_prompt = ((row & PROMPT_BIT) != 0).at[jnp.where(prompt, tokens, vocab_size)].set(True, mode="drop")
    row = jnp.minimum(outputs, MAX_COUNT) | jnp.where(in_prompt, PROMPT_BIT, 0)
    if drafter is not None and drafting is not None:
        at = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
        drafting = drafting._replace(memory=drafter.note(drafting.memory, slot[None], at[None], tokens[None]))
    return SlotTable(
        latest=slots.latest,
        count_row=slots.count_row.at[slot].set(count_row),
        counts=lax.dynamic_update_slice(slots.counts, row.astype(COUNT_DTYPE)[None], (count_row, 0)),
        bias_ids=slots.bias_ids.at[slot].set(bias_ids),
        bias_values=slots.bias_values.at[slot].set(bias_values),
        stop_ids=slots.stop_ids.at[slot].set(stop_ids),
        drafting=drafting,
    )


def idle_load(config: RunnerConfig) -> SlotLoad:
    """Of the scratch slot."""
    none = np.zeros(0, np.int32)
    return SlotLoad(config.max_sequences, config.count_rows, none, 0, none, none.astype(np.float32), none)


def load_steps(loads: Sequence[Sequence[SlotLoad]], config: RunnerConfig) -> Iterator[list[np.ndarray]]:
    """Arguments of the load program, call by call: of one load in each replica, one below the other.

    A replica with fewer loads than others fills its scratch slot meanwhile.

    Args:
        loads: of each replica.
    """
    if not any(loads):
        return
    (nothing,) = load_arguments(idle_load(config), config.vocab_size)
    each = [[call for load in some for call in load_arguments(load, config.vocab_size)] for some in loads]
    for calls in zip_longest(*each, fillvalue=nothing):
        yield [np.stack(arrays) for arrays in zip(*calls, strict=True)]


def count_outputs(counts: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Adds one output occurrence of `tokens[b]` to row `rows[b]`, up to MAX_COUNT."""
    held = counts[rows, tokens]
    return counts.at[rows, tokens].set(jnp.where((held & MAX_COUNT) < MAX_COUNT, held + 1, held))
