"""Special rows change nothing but themselves, and nothing depends on how many of them a program takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resin.pallas_kernels.table import pick_kernels
from resin.plan import Bucket, Phase, RunnerConfig, SamplingParams
from resin.plan.flags import SPECIAL
from resin.runtime.program_kind import ProgramKind
from resin.runtime.sampling import Sampled, sample
from resin.runtime.special import FEW_OF_ROWS, FEW_ROWS, MASK_ROWS, mask_blocks, special_counts
from tests.plan_builder import PlannedSequence
from tests.runtime.test_sampling import VOCAB, blocks_of, empty_columns, empty_slots, fill_row, load

ROWS = FEW_ROWS + 5
CONFIG = RunnerConfig(vocab_size=VOCAB, max_sequences=ROWS)
SPECIAL_POLICIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {3: 4.0, 200: -7.5, 17: -float("inf")}},
    {"stop_token_ids": (5, 17, 40), "min_output_tokens": 9},
    {"logprobs": 3},
    {"mask": 5},
    {"mask": 2, "logit_bias": {9: 2.0}, "logprobs": 0, "frequency_penalty": -1.0},
]
PLAIN_POLICIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7}, {"top_k": 9, "top_p": 0.8}]


@dataclass(frozen=True)
class Row:
    """A sequence of some length under a policy, at its next token."""

    policy: dict[str, Any]
    seed: int

    @property
    def is_special(self) -> bool:
        return not self.policy.keys() <= {"temperature", "top_k", "top_p"}

    def mask(self) -> np.ndarray | None:
        every = self.policy.get("mask")
        return None if every is None else np.arange(VOCAB) % every == 0

    def logits(self) -> np.ndarray:
        return (3 * np.random.default_rng(self.seed).standard_normal(VOCAB)).astype(np.float32)

    def sequence(self, slot: int) -> PlannedSequence:
        policy = {name: value for name, value in self.policy.items() if name != "mask"}
        tokens = np.random.default_rng(self.seed).integers(0, VOCAB, 4 + self.seed % 5).tolist()
        return PlannedSequence(slot, tokens, 3, SamplingParams(seed=self.seed, **policy))


@cache
def sampler(counts: tuple[int, ...]) -> Any:
    return jax.jit(partial(sample, kernels=pick_kernels("cpu"), counts=counts))


def draw(rows: Sequence[Row | None], counts: tuple[int, ...]) -> Sampled:
    """One step of a plan whose None rows are empty places."""
    logits = np.zeros((len(rows), VOCAB), np.float32)
    columns, masks = empty_columns(len(rows)), []
    columns["slots"][:] = CONFIG.max_sequences
    slots = empty_slots(CONFIG)
    for place, row in enumerate(rows):
        if row is None:
            continue
        sequence, mask = row.sequence(CONFIG.max_sequences - 1 - place), row.mask()
        logits[place] = row.logits()
        fill_row(columns, place, sequence, is_masked=mask is not None)
        if mask is not None:
            masks.append(mask)
        if sequence.params.needs_slot_load:
            slots = load(slots, sequence)
    assert np.count_nonzero(columns["row_flags"] & SPECIAL) == sum(row is not None and row.is_special for row in rows)
    return sampler(counts)(jnp.asarray(logits), columns, slots, blocks_of(masks, counts[-1]))


def check_counts(rows: Sequence[Row | None]) -> None:
    """Tokens, logprobs, counts and last tokens are the same whatever program runs the plan, and each row's alone."""
    number = sum(row is not None and row.is_special for row in rows)
    sizes = (0, FEW_ROWS, len(rows))
    together = draw(rows, sizes)
    for count in sizes:
        if count < number:
            continue
        other = draw(rows, (count,))
        np.testing.assert_array_equal(other.tokens, together.tokens)
        for mine, theirs in zip(jax.tree.leaves(other.slots), jax.tree.leaves(together.slots), strict=True):
            np.testing.assert_array_equal(mine[:-1], theirs[:-1])  # not scratch
        for place, row in enumerate(rows):
            if row is not None and "logprobs" in row.policy and other.logprobs is not None:
                for mine, theirs in zip(other.logprobs, together.logprobs or (), strict=True):
                    np.testing.assert_array_equal(mine[place], theirs[place])
    for place, row in enumerate(rows):
        if row is not None:
            alone = draw([row], special_counts(1))
            assert alone.tokens[0] == together.tokens[place], row
            if "logprobs" in row.policy:
                for mine, theirs in zip(alone.logprobs or (), together.logprobs or (), strict=True):
                    np.testing.assert_array_equal(mine[0], theirs[place])


@pytest.mark.parametrize("number", [0, 1, FEW_ROWS, FEW_ROWS + 1, ROWS])
def test_the_number_of_special_rows_changes_no_token(number: int) -> None:
    places = np.random.default_rng(number).permutation(ROWS)
    rows = [Row(PLAIN_POLICIES[place % 3], place) for place in range(ROWS)]
    for i, place in enumerate(places[:number]):
        rows[place] = Row({"temperature": 0.9 * (i % 2), **SPECIAL_POLICIES[i % len(SPECIAL_POLICIES)]}, int(place))
    check_counts(rows)


policies = st.sampled_from([*SPECIAL_POLICIES, *PLAIN_POLICIES, *PLAIN_POLICIES])
some_row = st.builds(Row, policies, st.integers(0, 1000))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.none() | some_row, min_size=ROWS, max_size=ROWS))
def test_any_mixture_of_rows_and_empty_places(rows: list[Row | None]) -> None:
    check_counts(rows)


def test_a_penalised_row_counts_its_token_and_no_other() -> None:
    rows = [Row(SPECIAL_POLICIES[0], 1), Row({"temperature": 0}, 2), Row({"logprobs": 0}, 3)]
    before = np.zeros((CONFIG.count_rows + 1, VOCAB), int)
    sequence = rows[0].sequence(ROWS - 1)
    for token in sequence.tokens[3:]:
        before[ROWS - 1, token] += 1
    sampled = draw(rows, (3,))
    before[ROWS - 1, int(sampled.tokens[0, 0])] += 1
    np.testing.assert_array_equal((np.asarray(sampled.slots.counts) & 0x3FFF)[:-1], before[:-1])


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 17, 256])
def test_blocks_hold_the_masks_of_all_rows(rows: int) -> None:
    assert rows <= mask_blocks(rows) * MASK_ROWS < rows + MASK_ROWS


def test_programs_without_branches_take_one_number_of_special_rows() -> None:
    for sequences in (1, FEW_ROWS, FEW_OF_ROWS, FEW_OF_ROWS + 1, 256):
        bucket = Bucket(Phase.DECODE, sequences, sequences, ())
        by_kind = {kind: kind.special_counts(bucket) for kind in ProgramKind}
        assert by_kind[ProgramKind.PLAIN] == by_kind[ProgramKind.FRESH] == (0,)
        assert by_kind[ProgramKind.ALL] == (sequences,) and by_kind[ProgramKind.FEW] == (FEW_ROWS,)
        few = (FEW_ROWS,) if sequences > FEW_OF_ROWS else ()
        assert by_kind[ProgramKind.ANY] == (0, *few, sequences)
