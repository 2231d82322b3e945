"""From logits to tokens on the device, in the order of `SamplingParams`. B rows, V tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.pallas_kernels.draw import Draw
from resin.pallas_kernels.table import Kernels
from resin.plan.flags import SPECIAL
from resin.runtime.logprobs import Logprobs, no_logprobs
from resin.runtime.slots import SlotTable
from resin.runtime.special import adjust_rows, count_tokens, gather_rows, score_rows

Columns = Mapping[str, jax.Array]


class Sampled(NamedTuple):
    """What sampling leaves: int32 [B, Q] tokens or RowFaults, the slots with them counted, Logprobs [B] or None."""

    tokens: jax.Array
    slots: SlotTable
    logprobs: Logprobs | None


def sample(
    logits: jax.Array,
    columns: Columns,
    slots: SlotTable,
    masks: Sequence[jax.Array],
    kernels: Kernels,
    counts: Sequence[int],
) -> Sampled:
    """One token at each of a row's Q places, or a RowFault where none can be chosen.

    Special rows try no drafts: their first place is the only one that counts, and is adjusted and scored alone.

    Args:
        logits: float32 [B * Q, V], raw.
        columns: the plan's columns.
        slots: device slot table.
        masks: blocks of `adjust_rows`.
        kernels: draw the tokens.
        counts: the R, rising, that the program has; with several it branches to the first that holds the plan's special
            rows.
    """
    with jax.named_scope("sampling"):
        rows = columns["slots"].shape[0]
        firsts = logits.reshape(rows, -1, logits.shape[1])[:, 0]
        gathered = [gather_rows(firsts, columns, slots, count) if count else None for count in counts]
        number = jnp.count_nonzero(columns["row_flags"] & SPECIAL)
        index = sum((number > count).astype(jnp.int32) for count in counts[:-1])

        def pick(special: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
            branches = [plain if rows is None else partial(special, rows) for rows in gathered]
            return lax.switch(index, branches, *args)

        if counts[-1]:
            firsts = pick(partial(adjust_rows, slots=slots, masks=masks), lambda logits: logits, firsts)
            logits = _with_firsts(logits, firsts)
        all_tokens = draw_tokens(logits, columns, kernels).reshape(rows, -1)
        tokens, logprobs = all_tokens[:, 0], None
        if counts[-1]:
            logprobs = pick(score_rows, lambda tokens: no_logprobs(len(tokens)), tokens)
            occurrences = pick(
                partial(count_tokens, count_row=slots.count_row), lambda held, tokens: held, slots.counts, tokens
            )
            slots = replace(slots, counts=occurrences)
    return Sampled(all_tokens, slots, logprobs)


def _with_firsts(logits: jax.Array, firsts: jax.Array) -> jax.Array:
    """Logits [B * Q, V] with those of each row's first place replaced."""
    if len(firsts) == len(logits):
        return firsts
    rows = logits.reshape(len(firsts), -1, logits.shape[1])
    return rows.at[:, 0].set(firsts).reshape(logits.shape)


def draw_tokens(logits: jax.Array, columns: Columns, kernels: Kernels) -> jax.Array:
    """One token a place, or a RowFault, from adjusted logits, int32 [B * Q]."""
    places = len(logits) // columns["slots"].shape[0]
    rows = {name: jnp.repeat(columns[name], places) for name in Draw._fields if name != "positions"}
    return kernels.sample_tokens(logits, Draw(positions=columns["draws"], **rows))
