"""Drafts: guesses at a sequence's next tokens, made on the device, which a decode plan checks in one pass.

A row's target and its drafts are drawn with the same noise, which is a function of (seed, position), so that a draft is
kept exactly where it is the token that would have been drawn without it: drafts change no token. B rows of Q token
places: a row's latest token, and after it up to Q - 1 = k drafts. S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from resin.plan import RunnerConfig
from resin.plan.output import DraftReport

Columns = Mapping[str, jax.Array]
NO_DRAFT = -1

# What a lookup matches at most and at least of a sequence's latest tokens.
LONGEST_MATCH, SHORTEST_MATCH = 4, 2


class Drafter(Protocol):
    """Guesses what follows. A hashable value, which becomes part of the programs."""

    def memory(self, config: RunnerConfig, sharding: jax.sharding.Sharding) -> Any:
        """Abstract arrays `[S + 1, ...]` of what it keeps of each slot (the last one is scratch); a pytree."""
        ...

    def note(self, memory: Any, slots: jax.Array, positions: jax.Array, tokens: jax.Array) -> Any:
        """The memory once these tokens are known.

        Args:
            memory: as `memory` describes.
            slots: int32 [B].
            positions: int32 [B, N], of each token in its sequence; those past the longest context are none.
            tokens: int32 [B, N].
        """
        ...

    def propose(self, memory: Any, slots: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        """int32 [B, count], what may follow the first `lengths` [B] tokens of these slots; NO_DRAFT from where on it
        has no guess."""
        ...


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """What followed the last time that a sequence's latest tokens came, in its prompt or its output: no weights.

    The longest match counts, of these the latest; a guess that runs into the sequence's own end goes round, as a text
    that repeats itself does.
    """

    def memory(self, config: RunnerConfig, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        """int32 [S + 1, max_context_tokens], the tokens of each sequence."""
        shape = (config.max_sequences + 1, config.max_context_tokens)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    def note(self, memory: jax.Array, slots: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
        return memory.at[slots[:, None], positions].set(tokens, mode="drop")

    def propose(self, memory: jax.Array, slots: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
        tokens, last = memory[slots], lengths[:, None]
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        matched = jnp.zeros(tokens.shape, jnp.int32)  # tokens before each place that are the sequence's latest ones
        is_match = (places < last) & (last > SHORTEST_MATCH)
        for back in range(1, LONGEST_MATCH + 1):
            wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
            before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=NO_DRAFT)[:, : tokens.shape[1]]
            is_match &= before == wanted
            matched += is_match.astype(jnp.int32)
        best = jnp.where(matched >= SHORTEST_MATCH, matched * tokens.shape[1] + places, NO_DRAFT)
        start = jnp.argmax(best, axis=1).astype(jnp.int32)[:, None]
        steps = jnp.arange(count, dtype=jnp.int32)[None, :] % jnp.maximum(last - start, 1)
        found = best.max(axis=1, keepdims=True) >= 0
        return jnp.where(found, jnp.take_along_axis(tokens, start + steps, axis=1), NO_DRAFT)


class Drafting(NamedTuple):
    """The slot table's part in it.

    Attributes:
        tokens: int32 [S + 1, k], guesses at what follows the slot's latest token; NO_DRAFT where there is none.
        memory: the drafter's own.
    """

    tokens: jax.Array
    memory: Any


def abstract_drafting(drafter: Drafter, config: RunnerConfig, sharding: jax.sharding.Sharding) -> Drafting:
    """Shapes."""
    shape = (config.max_sequences + 1, config.draft_tokens)
    tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return Drafting(tokens, drafter.memory(config, sharding))


def count_ready(drafts: jax.Array) -> jax.Array:
    """int32 [B], drafts [B, k] before the first NO_DRAFT."""
    return jnp.cumprod((drafts >= 0).astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


class Verdict(NamedTuple):
    """int32 [B] each: drafts that were compared, how many of them from the first on are the tokens drawn, and how many
    of these the row emits and keeps."""

    tried: jax.Array
    agreed: jax.Array
    kept: jax.Array


def verify(tokens: jax.Array, drafting: Drafting, columns: Columns) -> Verdict:
    """Holds a decode plan's drafts against what was drawn.

    Args:
        tokens: int32 [B, Q], drawn at each place.
        drafting: as the step found it.
        columns: the plan's, with those derived from them.
    """
    width = tokens.shape[1]
    drafts = drafting.tokens[columns["slots"]]
    tried = jnp.maximum(columns["live_tokens"] - 1, 0)
    if width == 1:  # no place for a draft; one is held against the token all the same, to tell what drafts are worth
        tried = jnp.where(columns["live_tokens"] > 0, jnp.minimum(count_ready(drafts), 1), 0)
    count = min(width, drafts.shape[1])
    places = jnp.arange(count, dtype=jnp.int32)[None, :]
    agrees = (drafts[:, :count] == tokens[:, :count]) & (places < tried[:, None])
    agreed = jnp.cumprod(agrees.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    return Verdict(tried, agreed, agreed if width > 1 else jnp.zeros_like(agreed))


def draft_next(
    drafter: Drafter, drafting: Drafting, columns: Columns, tokens: jax.Array, lengths: jax.Array, counts: jax.Array
) -> tuple[Drafting, jax.Array]:
    """Notes what the rows emitted, and guesses again.

    Args:
        drafter: whose memory the slots hold.
        drafting: as the step found it.
        columns: the plan's.
        tokens: int32 [B, Q], drawn at each place; a row emits the first `counts` [B].
        lengths: int32 [B], tokens of each sequence in the cache after the step: the next one's position.
        counts: int32 [B], 0 for rows that emit nothing.

    Returns:
        The slots' part, and int32 [B], guesses that each row has now.
    """
    slots, places = columns["slots"], jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    first = lengths - counts + 1
    nowhere = jnp.int32(jnp.iinfo(jnp.int32).max)
    positions = jnp.where(places < counts[:, None], first[:, None] + places, nowhere)
    memory = drafter.note(drafting.memory, slots, positions, jnp.maximum(tokens, 0))
    count = drafting.tokens.shape[1]
    guesses = drafter.propose(memory, slots, lengths + 1, count)
    guesses = jnp.where(counts[:, None] > 0, guesses, NO_DRAFT)
    return Drafting(drafting.tokens.at[slots].set(guesses), memory), count_ready(guesses)


def report(verdict: Verdict, ready: jax.Array) -> jax.Array:
    """int32 [B, 3], a DraftReport of each row."""
    columns = DraftReport(tried=verdict.tried, agreed=verdict.agreed, ready=ready)
    return jnp.stack(columns, axis=1)
