"""From logits to tokens on the device, in the order of `SamplingParams`. B rows, V tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.models.axes import NOT_CUT, Axes, Axis
from resin.pallas_kernels.draw import Draw
from resin.pallas_kernels.table import Kernels
from resin.plan import RowFlag
from resin.plan.flags import SPECIAL
from resin.plan.sampling import SAMPLING_COLUMNS
from resin.runtime.logprobs import Logprobs, no_logprobs
from resin.runtime.slots import SlotTable
from resin.runtime.special import SpecialRows, adjust_rows, count_tokens, gather_rows, score_rows

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
    axes: Axes = NOT_CUT,
) -> Sampled:
    """One token at each of a row's Q places, or a RowFault where none can be chosen.

    Special rows try no drafts: their first place is the only one that counts, and is adjusted and scored alone. Devices
    that have logits of a share of the rows each draw the tokens of these, and then tell each other.

    Args:
        logits: float32 [B * Q, V], raw; or this device's share of the rows.
        columns: the plan's columns.
        slots: device slot table.
        masks: blocks of `adjust_rows`.
        kernels: draw the tokens.
        counts: the R, rising, that the program has; with several it branches to the first that holds the plan's special
            rows.
        axes: over which rows are shared as the vocabulary is.
    """
    with jax.named_scope("sampling"):
        rows = columns["slots"].shape[0]
        is_share = len(logits) < columns["draws"].shape[0]
        mine = _own_columns(columns, axes) if is_share else columns
        held = mine["slots"].shape[0]
        special = _Special.of(mine, slots, counts, _masks_before(columns, axes) if is_share else 0)
        raw = logits.reshape(held, -1, logits.shape[1])[:, 0]
        if counts[-1]:
            adjusted = special.pick(partial(adjust_rows, slots=slots, masks=masks), lambda logits: logits, raw)
            logits = _with_firsts(logits, adjusted)
        all_tokens = draw_tokens(logits, mine, kernels).reshape(held, -1)
        logprobs = None
        if counts[-1]:
            nothing = no_logprobs(held)
            logprobs = special.pick(score_rows, lambda logits, tokens: nothing, raw, all_tokens[:, 0])
        if is_share:
            all_tokens, logprobs = jax.tree.map(partial(axes.gather_rows, axis=Axis.VOCAB), (all_tokens, logprobs))
            special = _Special.of(columns, slots, counts, 0)
        if counts[-1]:
            count = partial(count_tokens, count_row=slots.count_row)
            occurrences = special.pick(count, lambda held, tokens: held, slots.counts, all_tokens[:, 0])
            slots = replace(slots, counts=occurrences)
        assert len(all_tokens) == rows
    return Sampled(all_tokens, slots, logprobs)


class _Special(NamedTuple):
    """The special rows of a program for several numbers of them.

    Attributes:
        gathered: for each number it can take, None for none.
        branch: int32 [], which of these the plan needs.
    """

    gathered: Sequence[SpecialRows | None]
    branch: jax.Array | int

    @classmethod
    def of(cls, columns: Columns, slots: SlotTable, counts: Sequence[int], first_mask: jax.Array | int) -> _Special:
        rows = columns["slots"].shape[0]
        gathered = [gather_rows(columns, slots, min(count, rows), first_mask) if count else None for count in counts]
        number = jnp.count_nonzero(columns["row_flags"] & SPECIAL)
        return cls(gathered, sum((number > count).astype(jnp.int32) for count in counts[:-1]))

    def pick(self, special: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
        """`special` of the rows that there are, and of `args`; `plain` of these where there are none."""
        branches = [plain if rows is None else partial(special, rows) for rows in self.gathered]
        return lax.switch(self.branch, branches, *args)


def _own_columns(columns: Columns, axes: Axes) -> dict[str, jax.Array]:
    """The columns that sampling reads, of this device's share of the rows."""
    names = ("slots", "row_flags", "draws", *(column.name for column in SAMPLING_COLUMNS))
    return {name: axes.own_rows(columns[name], Axis.VOCAB) for name in names}


def _masks_before(columns: Columns, axes: Axes) -> jax.Array:
    """int32 [], masks of the rows before this device's share."""
    has_mask = ((columns["row_flags"] & RowFlag.MASK) != 0).astype(jnp.int32)
    first = axes.index(Axis.VOCAB) * (len(has_mask) // axes.size(Axis.VOCAB))
    return jnp.sum(jnp.where(jnp.arange(len(has_mask), dtype=jnp.int32) < first, has_mask, 0), dtype=jnp.int32)


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
