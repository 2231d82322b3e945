from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from resin.plan import ArenaSpec, InvalidRequest, PlanRejected, SamplingParams
from resin.runtime import ModelRunner, build_runner
from resin.runtime.ledger import program_temporary_bytes
from tests.plan_builder import PlanBuilder, PlannedSequence
from tests.runtime.tiny_runner import (
    NUM_PAGES,
    build_tiny,
    builder_for,
    reference_greedy,
    reference_logits,
    tiny_checkpoint,
    tiny_options,
)

PROMPTS = [np.random.default_rng(n).integers(3, 256, n).tolist() for n in (1, 5, 13, 23)]
LOGPROBS = SamplingParams(temperature=0, logprobs=5)


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(family: str) -> ModelRunner:
    return build_tiny(family)


def run_chunks(runner: ModelRunner, builder: PlanBuilder, sequence: PlannedSequence, budget: int) -> None:
    while sequence.cached < len(sequence.tokens):
        count = min(budget, len(sequence.tokens) - sequence.cached)
        output = runner.forward(builder.prefill([(sequence, count)]))
    sequence.tokens += output.token_ids.tolist()


def decode(runner: ModelRunner, builder: PlanBuilder, sequences: Sequence[PlannedSequence], steps: int) -> None:
    for _ in range(steps):
        output = runner.forward(builder.decode(sequences))
        for sequence, token in zip(sequences, output.token_ids.tolist(), strict=True):
            sequence.tokens.append(token)


def test_prefill_and_decode_logprobs_equal_the_whole_sequence_forward(runner: ModelRunner, family: str) -> None:
    builder = builder_for(runner)
    for slot, prompt in enumerate(PROMPTS):
        sequence = builder.sequence(slot, prompt, LOGPROBS)
        output = runner.forward(builder.prefill([(sequence, len(prompt))]))
        for _ in range(20):
            tokens = sequence.tokens
            expected = jax.nn.log_softmax(reference_logits(family, tokens)[-1])
            order = np.argsort(-expected, kind="stable")[:5]
            np.testing.assert_allclose(output.top_logprobs[0], expected[order], atol=5e-5)
            np.testing.assert_array_equal(output.top_ids[0], order)
            assert output.token_ids[0] == order[0]
            assert output.logprobs[0] == output.top_logprobs[0, 0]
            tokens.append(int(output.token_ids[0]))
            output = runner.forward(builder.decode([sequence]))


def test_batched_chunked_and_alone_give_the_same_tokens(runner: ModelRunner, family: str) -> None:
    expected = [reference_greedy(family, prompt, 12) for prompt in PROMPTS]
    for budget in (3, 8, 32):
        builder = builder_for(runner)
        sequences = [builder.sequence(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
        for sequence in sequences:
            run_chunks(runner, builder, sequence, budget)
        decode(runner, builder, sequences, 11)
        assert [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences] == expected


def test_packed_prefill_with_chunks_after_cached_prefixes(runner: ModelRunner, family: str) -> None:
    builder = builder_for(runner)
    sequences = [builder.sequence(slot, prompt) for slot, prompt in enumerate(PROMPTS)]
    runner.forward(builder.prefill([(sequences[3], 7), (sequences[2], 9)]))
    chunks = [(sequences[1], 5), (sequences[3], 16), (sequences[0], 1), (sequences[2], 4)]
    output = runner.forward(builder.prefill(chunks))
    np.testing.assert_array_equal(output.token_indptr, [0, 1, 2, 3, 4])
    expected = [reference_greedy(family, PROMPTS[index], 1)[0] for index in (1, 3, 0, 2)]
    assert output.token_ids.tolist() == expected


def test_rows_without_emit_return_no_tokens(runner: ModelRunner) -> None:
    builder = builder_for(runner)
    short, long = builder.sequence(0, PROMPTS[1]), builder.sequence(1, PROMPTS[3])
    output = runner.forward(builder.prefill([(long, 10), (short, 5)]))
    np.testing.assert_array_equal(output.token_indptr, [0, 0, 1])
    assert len(output.token_ids) == 1


def test_bucket_padding_never_changes_tokens(runner: ModelRunner) -> None:
    prefill = [bucket for bucket in runner.config.buckets if bucket.phase == 0]
    decodes = [bucket for bucket in runner.config.buckets if bucket.phase == 1]
    results = []
    for first, second in zip(prefill, decodes, strict=True):
        builder = builder_for(runner)
        sequence = builder.sequence(2, PROMPTS[1])
        sequence.tokens += runner.forward(builder.prefill([(sequence, 5)], bucket=first)).token_ids.tolist()
        for _ in range(6):
            sequence.tokens += runner.forward(builder.decode([sequence], bucket=second)).token_ids.tolist()
        results.append(sequence.tokens)
    assert results[0] == results[1]


def test_overlapped_dispatch_equals_synchronous(runner: ModelRunner, family: str) -> None:
    builder = builder_for(runner)
    sequence = builder.sequence(1, PROMPTS[2])
    handles = [runner.dispatch(builder.prefill([(sequence, 13)]))]
    handles += [runner.dispatch(builder.decode([sequence])) for _ in range(7)]
    tokens = [int(runner.collect(handle).token_ids[0]) for handle in handles]
    assert tokens == reference_greedy(family, PROMPTS[2], 8)


def test_decode_takes_given_tokens_when_not_from_slot(runner: ModelRunner, family: str) -> None:
    builder = builder_for(runner)
    sequence = builder.sequence(0, PROMPTS[2])
    runner.forward(builder.prefill([(sequence, 12)]))
    output = runner.forward(builder.decode([sequence], from_slot=False))
    assert output.token_ids.tolist() == reference_greedy(family, PROMPTS[2], 1)


def test_prompt_logprobs_cross_chunk_borders(runner: ModelRunner, family: str) -> None:
    builder = builder_for(runner)
    prompt = PROMPTS[3]
    sequence = builder.sequence(0, prompt, SamplingParams(temperature=0, prompt_logprobs=3))
    outputs = [runner.forward(builder.prefill([(sequence, count)])) for count in (9, 14)]
    got = np.concatenate([output.prompt_logprobs for output in outputs])[:-1]
    expected = jax.nn.log_softmax(reference_logits(family, prompt))
    np.testing.assert_allclose(got, expected[np.arange(22), prompt[1:]], atol=2e-5)
    top = np.concatenate([output.prompt_top_logprobs for output in outputs])
    np.testing.assert_allclose(top, -np.sort(-expected, axis=-1)[:, :3], atol=2e-5)


def test_no_program_copies_the_arena(runner: ModelRunner) -> None:
    arena = NUM_PAGES * runner.config.geometry.page_bytes
    assert {bucket for bucket, _ in runner._programs.compiled} == set(runner.config.buckets)
    for (bucket, _), program in runner._programs.compiled.items():
        assert program_temporary_bytes(program) < arena / 100, bucket


def test_nothing_compiles_after_ready(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    builder = builder_for(runner)
    busy = SamplingParams(temperature=1, top_p=0.9, seed=1, logprobs=2, presence_penalty=1, logit_bias={3: 1.0})
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, logger="jax"):
        for bucket in runner.config.buckets:
            for params in (LOGPROBS, busy):
                sequence = builder.sequence(0, PROMPTS[1], params)
                if bucket.phase == 0:
                    runner.forward(builder.prefill([(sequence, 5)], bucket=bucket))
                else:
                    runner.forward(builder.decode([sequence], bucket=bucket))
    assert not [record.message for record in caplog.records if "ompil" in record.message]
    assert runner.observations()["compilations_after_ready"] == 0


def test_arena_and_slots_stay_in_place(runner: ModelRunner) -> None:
    builder = builder_for(runner)
    sequence = builder.sequence(0, PROMPTS[1])
    runner.forward(builder.prefill([(sequence, 5)]))
    before = runner._state.arena.unsafe_buffer_pointer(), runner._state.slots.counts.unsafe_buffer_pointer()
    for _ in range(3):
        runner.forward(builder.decode([sequence]))
    assert before == (runner._state.arena.unsafe_buffer_pointer(), runner._state.slots.counts.unsafe_buffer_pointer())


def test_unknown_buckets_and_bad_masks_are_rejected_before_anything_runs(runner: ModelRunner) -> None:
    builder = builder_for(runner)
    sequence = builder.sequence(0, PROMPTS[1])
    plan = builder.prefill([(sequence, 5)], masks={0: np.ones(256, bool)})
    runner.accept(plan)
    other = type(plan.bucket)(plan.phase, 3, 7, (9,))
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    with pytest.raises(PlanRejected, match="bucket"):
        runner.accept(type(plan)(**(fields | {"bucket": other})))
    with pytest.raises(PlanRejected, match="allowed_masks"):
        runner.accept(type(plan)(**(fields | {"allowed_masks": np.zeros((1, 1), np.int32)})))


def test_a_lazy_runner_counts_no_compilation_as_late() -> None:
    runner = build_runner(tiny_checkpoint("llama"), tiny_options())
    runner.bind(ArenaSpec(NUM_PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    builder = builder_for(runner)
    runner.forward(builder.prefill([(builder.sequence(0, PROMPTS[1]), 5)]))
    assert runner.observations()["compilations_after_ready"] == 0
    assert runner.observations()["executables"] == 1


def test_bind_checks_its_arguments(runner: ModelRunner) -> None:
    fresh = build_runner(tiny_checkpoint("llama"), tiny_options())
    page_bytes = fresh.config.geometry.page_bytes
    with pytest.raises(InvalidRequest, match="bind"):
        fresh.warm_up()
    with pytest.raises(InvalidRequest, match="page_bytes"):
        fresh.bind(ArenaSpec(8, page_bytes * 2, "float32"))
    with pytest.raises(InvalidRequest, match="num_pages"):
        fresh.bind(ArenaSpec(1, page_bytes, "float32"))
    with pytest.raises(InvalidRequest, match="2\\^31 rows"):
        fresh.bind(ArenaSpec(1 << 30, page_bytes, "float32"))
    with pytest.raises(InvalidRequest, match="not bound"):
        runner.bind(ArenaSpec(8, page_bytes, "float32"))
