"""Drafts on the device: lookups against a plain search, and what a step keeps of them."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.plan import RunnerConfig
from resin.runtime.drafting import (
    LONGEST_MATCH,
    NO_DRAFT,
    SHORTEST_MATCH,
    Drafting,
    PromptLookup,
    abstract_drafting,
    draft_next,
    verify,
)

CONTEXT, SLOTS = 40, 5
CONFIG = RunnerConfig(vocab_size=50, max_sequences=SLOTS, max_context_tokens=CONTEXT, draft_tokens=4)


def empty() -> Drafting:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_drafting(PromptLookup(), CONFIG, sharding)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The same by search."""
    for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        if size > len(tokens) - 1:
            continue
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                return [tokens[start + i % (len(tokens) - start)] for i in range(count)]
    return [NO_DRAFT] * count


@pytest.mark.parametrize("vocab", [2, 4, 12])
def test_a_lookup_finds_what_followed_the_longest_and_latest_match(vocab: int) -> None:
    draw, drafter = random.Random(vocab), PromptLookup()
    propose = jax.jit(lambda memory, slots, lengths: drafter.propose(memory, slots, lengths, 4))
    for _ in range(60):
        memory = np.array([[draw.randrange(vocab) for _ in range(CONTEXT)] for _ in range(SLOTS + 1)], np.int32)
        slots = np.array(draw.sample(range(SLOTS), 3), np.int32)
        lengths = np.array([draw.randint(1, CONTEXT) for _ in slots], np.int32)
        found = np.asarray(propose(memory, slots, lengths)).tolist()
        for row, slot, length in zip(found, slots, lengths, strict=True):
            assert row == looked_up(memory[slot, :length].tolist(), 4)


def test_what_repeats_itself_goes_on_so() -> None:
    drafting = empty()
    memory = drafting.memory.at[2, :7].set(jnp.array([9, 1, 2, 3, 1, 2, 3], jnp.int32))
    found = PromptLookup().propose(memory, jnp.array([2], jnp.int32), jnp.array([7], jnp.int32), 7)
    assert found.tolist() == [[1, 2, 3, 1, 2, 3, 1]]


def test_a_row_keeps_the_drafts_that_were_drawn() -> None:
    drafting = empty()._replace(tokens=jnp.array([[1, 2, 3, 4]] * 5 + [[0] * 4], jnp.int32))
    tokens = jnp.array([[1, 2, 3, 9], [1, 9, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], jnp.int32)
    live = jnp.array([4, 4, 4, 2, 0], jnp.int32)  # tokens of each row: its own, and drafts
    columns = {"slots": jnp.arange(5, dtype=jnp.int32), "live_tokens": live}
    verdict = verify(tokens, drafting, columns)
    assert verdict.tried.tolist() == [3, 3, 3, 1, 0]
    assert verdict.agreed.tolist() == verdict.kept.tolist() == [3, 1, 0, 1, 0]
    shadow = verify(tokens[:, :1], drafting, columns)
    assert shadow.tried.tolist() == [1, 1, 1, 1, 0] and shadow.agreed.tolist() == [1, 1, 0, 1, 0]
    assert not shadow.kept.any(), "a plan without places for drafts emits one token a row"


def test_emitted_tokens_are_noted_where_they_stand() -> None:
    drafter, drafting = PromptLookup(), empty()
    memory = drafting.memory.at[1, :6].set(jnp.array([5, 6, 7, 5, 6, 7], jnp.int32))
    columns = {"slots": jnp.array([1, 3, SLOTS], jnp.int32)}
    tokens = jnp.array([[5, 6, 40], [8, 41, 42], [1, 1, 1]], jnp.int32)
    # Five tokens of slot 1 were in the cache, and the sixth with one draft is now; slot 3 emits nothing.
    lengths, counts = jnp.array([7, 4, 0], jnp.int32), jnp.array([2, 0, 0], jnp.int32)
    after, ready = draft_next(drafter, drafting._replace(memory=memory), columns, tokens, lengths, counts)
    assert after.memory[1, :9].tolist() == [5, 6, 7, 5, 6, 7, 5, 6, 0] and not after.memory[3].any()
    assert after.tokens[1].tolist() == [7, 5, 6, 7] and ready.tolist() == [4, 0, 0]
    assert after.tokens[3].tolist() == [NO_DRAFT] * 4
