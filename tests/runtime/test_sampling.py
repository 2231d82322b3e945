from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.pallas_kernels.draw import Draw, kept_tokens
from resin.pallas_kernels.table import pick_kernels
from resin.plan import Phase, RunnerConfig, SamplingParams
from resin.plan.sampling import SAMPLING_COLUMNS
from resin.runtime.sampling import sample
from resin.runtime.slots import SlotTable, abstract_slots, count_outputs, load_arguments, load_slot
from resin.runtime.special import MASK_ROWS, mask_blocks
from tests.plan_builder import PlannedSequence, fill_sampling, pack_mask, row_flags, slot_load
from tests.runtime.sampling_reference import adjusted, kept, noise

VOCAB = 203  # not a multiple of 32 or of a vector
ROWS = 6
CONFIG = RunnerConfig(vocab_size=VOCAB, max_sequences=ROWS)
rng = np.random.default_rng(11)
LOGITS = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)

sample_jit = jax.jit(partial(sample, kernels=pick_kernels("cpu"), counts=(0, ROWS)))


@jax.jit
def kept_jit(values: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    none = jnp.zeros(ROWS, jnp.int32)
    return kept_tokens(values, Draw(jnp.ones(ROWS), top_k, top_p, min_p, none, none, none))


load_jit = jax.jit(partial(load_slot, None))


def empty_slots(config: RunnerConfig = CONFIG) -> SlotTable:
    abstract = abstract_slots(config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)


def load(slots: SlotTable, sequence: PlannedSequence) -> SlotTable:
    for arguments in load_arguments(slot_load(sequence, slots.counts.shape[0] - 1), VOCAB):
        slots = load_jit(slots, *arguments)
    return slots


def draw(
    logits: np.ndarray,
    sequences: Sequence[PlannedSequence],
    masks: dict[int, np.ndarray] | None = None,
    slots: SlotTable | None = None,
) -> list[int]:
    """Tokens of rows whose sequences stand at their current length."""
    masks, slots = masks or {}, slots or empty_slots()
    columns = empty_columns(ROWS)
    for row, sequence in enumerate(sequences):
        fill_row(columns, row, sequence, is_masked=row in masks)
        if sequence.params.needs_slot_load:
            slots = load(slots, sequence)
    blocks = blocks_of([masks[row] for row in sorted(masks)], ROWS)
    sampled = sample_jit(jnp.asarray(logits), columns, slots, blocks)
    return np.asarray(sampled.tokens)[: len(sequences), 0].tolist()


def empty_columns(rows: int) -> dict[str, np.ndarray]:
    """The columns that sampling reads, of padding."""
    columns = {name: np.zeros(rows, np.int32) for name in ("draws", "slots", "row_flags")}
    columns["slots"][:] = rows
    return columns | {column.name: np.zeros(rows, column.dtype) for column in SAMPLING_COLUMNS}


def fill_row(columns: dict[str, np.ndarray], row: int, sequence: PlannedSequence, *, is_masked: bool) -> None:
    """A row that decodes the sequence's next token."""
    fill_sampling(columns, row, sequence.params)
    columns["draws"][row], columns["slots"][row] = len(sequence.tokens), sequence.slot
    columns["row_flags"][row] = row_flags(sequence.params, sequence, True, False, is_masked, Phase.DECODE)


def blocks_of(masks: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, ...]:
    """bool [V] masks in the blocks that a program of `rows` special rows takes."""
    words = np.zeros((mask_blocks(rows), MASK_ROWS, -(-VOCAB // 32)), np.int32)
    for place, mask in enumerate(masks):
        words[divmod(place, MASK_ROWS)] = pack_mask(mask)
    return tuple(words)


def sequences_of(params: Sequence[SamplingParams], length: int = 5) -> list[PlannedSequence]:
    return [PlannedSequence(slot, list(range(length)), 3, each) for slot, each in enumerate(params)]


def expected_token(logits: np.ndarray, sequence: PlannedSequence) -> int:
    params, prompt = sequence.params, sequence.tokens[: sequence.prompt_tokens]
    out = adjusted(logits, params, prompt, sequence.tokens[sequence.prompt_tokens :])
    if params.temperature == 0:
        return int(out.argmax())
    out = out / np.float64(np.float32(params.temperature))
    scores = np.where(kept(out, params), out, -np.inf) + noise(params.seed or 0, len(sequence.tokens), VOCAB)
    return int(scores.argmax())


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, top_k=7, seed=2**63 + 5),
    SamplingParams(temperature=1.4, top_p=0.8, seed=-4),
    SamplingParams(temperature=1.0, min_p=0.2, seed=9),
    SamplingParams(temperature=2.0, top_k=50, top_p=0.9, min_p=0.05, seed=77),
]


def test_mixed_rows_draw_what_the_reference_draws() -> None:
    for length in range(3, 43):
        sequences = sequences_of(MIXED, length)
        assert draw(LOGITS, sequences) == [expected_token(LOGITS[row], each) for row, each in enumerate(sequences)]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=42)
    alone = draw(np.tile(LOGITS[2], (ROWS, 1)), sequences_of([params], 9))
    batched = draw(np.tile(LOGITS[2], (ROWS, 1)), sequences_of([*MIXED[:4], params], 9))
    assert batched[4] == alone[0]
    draws = {tuple(draw(np.tile(LOGITS[2], (ROWS, 1)), sequences_of([params], length))) for length in range(1, 30)}
    assert len(draws) > 5


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, [9, 40, 100]] = 2.0
    logits[1, 7], logits[1, 3] = 0.0, -0.0
    logits[2] = -np.inf
    logits[2, 202] = -5.0
    assert draw(logits, sequences_of([SamplingParams(temperature=0)] * 3)) == [9, 0, 202]


@pytest.mark.parametrize("values", [LOGITS, np.round(LOGITS), np.sign(LOGITS), np.zeros_like(LOGITS)])
@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_k": 10}, {"top_k": 203}, {"top_p": 0.5}, {"top_p": 1e-6}, {"min_p": 0.3}]
)
def test_each_cut_keeps_exactly_the_reference_set(values: np.ndarray, cut: dict[str, float]) -> None:
    params = SamplingParams(**cut)  # type: ignore[arg-type]
    got = kept_jit(
        jnp.asarray(values),
        jnp.full(ROWS, params.top_k, jnp.int32),
        jnp.full(ROWS, params.top_p, jnp.float32),
        jnp.full(ROWS, params.min_p, jnp.float32),
    )
    for row in range(ROWS):
        expected = kept(values[row].astype(np.float64), params)
        if "top_p" in cut and np.asarray(got)[row].sum() != expected.sum():
            # float32 sums may land on either side of the border, by one token at most.
            assert abs(int(np.asarray(got)[row].sum()) - int(expected.sum())) == 1
            assert values is not LOGITS
        else:
            np.testing.assert_array_equal(np.asarray(got)[row], expected)


def test_cuts_mix_per_row_and_minus_infinity_never_survives_a_threshold() -> None:
    values = LOGITS.copy()
    values[:, ::2] = -np.inf
    got = kept_jit(
        jnp.asarray(values),
        jnp.asarray([0, 4, 0, 0, 12, 150], jnp.int32),
        jnp.asarray([1, 1, 0.7, 1, 0.6, 0.999], jnp.float32),
        jnp.asarray([0, 0, 0, 0.5, 0.01, 0], jnp.float32),
    )
    three = {"top_k": 12, "top_p": 0.6, "min_p": 0.01}
    cuts = [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.5}, three, {"top_k": 150, "top_p": 0.999}]
    for row, cut in enumerate(cuts):
        expected = kept(values[row].astype(np.float64), SamplingParams(**cut))  # type: ignore[arg-type]
        np.testing.assert_array_equal(np.asarray(got)[row], expected)


ADJUSTED = [
    SamplingParams(temperature=0, repetition_penalty=1.9),
    SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=1.5),
    SamplingParams(temperature=0, logit_bias={0: 100.0}),
    SamplingParams(temperature=0, logit_bias={index: -float("inf") for index in range(190)}),
    SamplingParams(temperature=0, stop_token_ids=(17, 18), min_output_tokens=4),
    SamplingParams(temperature=1.3, top_k=9, seed=5, repetition_penalty=0.5, logit_bias={4: 2.0}),
]


def test_penalties_bias_and_stop_suppression_follow_the_reference() -> None:
    logits = LOGITS.copy()
    logits[4, [17, 18]] = 50.0
    logits[:2, [3, 5]] = 12.0, 11.0
    sequences = sequences_of(ADJUSTED)
    for each in sequences:
        each.tokens = [5, 3, 5, 3, 3, 200]
    got = draw(logits, sequences)
    assert got == [expected_token(logits[row], each) for row, each in enumerate(sequences)]
    assert got[2] == 0 and got[3] >= 190 and got[4] not in (17, 18)


def test_a_slot_load_replaces_what_the_slot_held() -> None:
    noisy = PlannedSequence(0, [1, 1, 1, 2], 2, SamplingParams(temperature=0, presence_penalty=2, logit_bias={8: 99.0}))
    slots = load(empty_slots(), noisy)
    fresh = PlannedSequence(0, [7, 9], 1, SamplingParams(temperature=0, presence_penalty=2))
    assert draw(LOGITS, [fresh], slots=slots) == [expected_token(LOGITS[0], fresh)]


def test_long_loads_take_several_calls_and_emitted_tokens_count() -> None:
    tokens = rng.integers(0, VOCAB, 5000).tolist()
    sequence = PlannedSequence(2, tokens, 3000, SamplingParams(temperature=0, frequency_penalty=0.5))
    slots = load(empty_slots(), sequence)
    counted = count_outputs(slots.counts, jnp.asarray([2], jnp.int32), jnp.asarray([7], jnp.int32))
    slots = replace(slots, counts=counted)
    counts = np.asarray(slots.counts)[2].astype(int)
    expected = np.bincount(tokens[3000:], minlength=VOCAB)
    expected[7] += 1
    np.testing.assert_array_equal(counts & 0x3FFF, expected)
    np.testing.assert_array_equal(counts >> 14 != 0, np.bincount(tokens[:3000], minlength=VOCAB) > 0)


def test_masks_and_logprobs() -> None:
    allowed = np.zeros(VOCAB, bool)
    allowed[[3, 150, 202]] = True
    sequences = sequences_of([SamplingParams(temperature=0), SamplingParams(temperature=5, seed=3)])
    tokens = draw(LOGITS, sequences, masks={0: allowed, 1: allowed})
    assert tokens[0] == [3, 150, 202][int(LOGITS[0][[3, 150, 202]].argmax())] and allowed[tokens[1]]
    assert draw(LOGITS, sequences, masks={1: allowed})[0] == int(LOGITS[0].argmax())
