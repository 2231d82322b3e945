"""Steps and outputs come out of their messages as they went in; anything else is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from resin import Engine, ForwardOutput, SamplingParams
from resin.plan import ArenaSpec, Phase, RowFlag, StepPlan, empty_step, wire
from tests.fakes import PagedFake, fake_config, history_group, state_group, window_group

CONFIG = fake_config((history_group(), window_group(10), state_group(8, rows=20)))
ARENA = ArenaSpec(100, CONFIG.geometry.page_bytes, CONFIG.arena_dtype)


@pytest.fixture(scope="module")
def steps() -> list[StepPlan]:
    """Of requests with and without masks, penalties and biases."""
    allowed = np.arange(251) % 2 == 0
    runner = PagedFake(CONFIG)
    with Engine(runner) as engine:
        for i in range(6):
            params = SamplingParams(
                max_output_tokens=4,
                temperature=0.5,
                logit_bias={4: 2.5} if i % 2 else {},
                presence_penalty=0.5 if i == 3 else 0,
                allowed_tokens=(lambda output: allowed) if i % 3 == 2 else None,
            )
            engine.submit([1 + i] * (10 + i), sampling_params=params)
        while engine.has_work():
            engine.step()
    return [StepPlan.of(plan) for plan in runner.plans]


def test_steps_come_back_as_they_were(steps: list[StepPlan]) -> None:
    assert {step.bucket.phase for step in steps} == set(Phase)
    assert any(plan.slot_loads for step in steps for plan in step.plans)
    assert any(plan.allowed_masks is not None for step in steps for plan in step.plans)
    for step in steps:
        again = wire.decode_step(wire.encode_step(step), CONFIG)
        assert again.bucket == step.bucket
        for mine, theirs in zip(again.plans, step.plans, strict=True):
            assert (mine.step, mine.request_ids) == (theirs.step, theirs.request_ids)
            assert (mine.num_sequences, mine.num_tokens) == (theirs.num_sequences, theirs.num_tokens)
            assert mine.buffer.flags.aligned and not mine.buffer.flags.writeable
            assert_same(mine.buffer, theirs.buffer)
            assert_same(mine.allowed_masks, theirs.allowed_masks)
            for load, other in zip(mine.slot_loads, theirs.slot_loads, strict=True):
                for field in dataclasses.fields(load):
                    assert_same(getattr(load, field.name), getattr(other, field.name))


def test_a_step_of_replicas(steps: list[StepPlan]) -> None:
    config = dataclasses.replace(CONFIG, replicas=2)
    bucket = steps[-1].bucket
    pair = StepPlan(bucket, (*steps[-1].plans, *empty_step(CONFIG, bucket).plans))
    again = wire.decode_step(wire.encode_step(pair), config)
    assert np.array_equal(again.buffer, pair.buffer)
    with pytest.raises(wire.WireError, match="2 plans for 1 replicas"):
        wire.decode_step(wire.encode_step(pair), CONFIG)


def test_outputs_come_back_with_the_fields_that_they_have() -> None:
    tokens, indptr = np.array([3, 5, 8], np.int64), np.array([0, 1, 3])
    logprobs = np.array([-0.5, -1, -np.inf], np.float32)
    first = ForwardOutput(tokens, indptr, logprobs, drafting=np.ones((2, 3), np.int32))
    second = ForwardOutput(tokens[:0], indptr[:1])
    number, again = wire.decode_outputs(wire.encode_outputs(7, [first, second]))
    assert number == 7 and len(again) == 2
    for mine, theirs in zip(again, (first, second), strict=True):
        for field in dataclasses.fields(mine):
            assert_same(getattr(mine, field.name), getattr(theirs, field.name))


def test_a_config_comes_back() -> None:
    drafts = fake_config((history_group(),), draft_tokens=3)
    for config in (CONFIG, drafts):
        assert wire.decode_config(wire.encode_config(config, ARENA)) == (config, ARENA)


def test_cut_and_changed_messages_are_refused(steps: list[StepPlan]) -> None:
    message = wire.encode_step(next(step for step in steps if step.plans[0].slot_loads))
    for size in (*range(wire.HEAD_BYTES + 8), len(message) // 2, len(message) - 1):
        with pytest.raises(wire.WireError):
            wire.decode_step(message[:size], CONFIG)
    with pytest.raises(wire.WireError):
        wire.decode_step(message + b"\0", CONFIG)
    head = wire.read_head(message)
    for place in range(wire.HEAD_BYTES + head.description_bytes):  # arrays are data, whatever they hold
        changed = bytearray(message)
        changed[place] ^= 0x55
        try:
            wire.decode_step(bytes(changed), CONFIG)
        except wire.WireError:
            continue


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({0: b"P"}, "not a message"),
        ({2: b"\x63"}, "version 99; this Resin reads version"),
        ({4: b"\x09"}, "unknown kind, 9"),
        ({4: b"\x02"}, "kind OUTPUTS where one of kind STEP"),
    ],
)
def test_other_messages_are_refused_by_name(steps: list[StepPlan], change: dict[int, bytes], what: str) -> None:
    message = bytearray(wire.encode_step(steps[0]))
    for place, byte in change.items():
        message[place : place + 1] = byte
    with pytest.raises(wire.WireError, match=what):
        wire.decode_step(bytes(message), CONFIG)


def test_a_plan_for_another_runner_is_refused(steps: list[StepPlan]) -> None:
    other = fake_config((history_group(),))
    with pytest.raises(wire.WireError, match="none of the runner's buckets"):
        wire.decode_step(wire.encode_step(steps[0]), other)


def test_masks_travel_for_masked_rows_alone(steps: list[StepPlan]) -> None:
    for step in steps:
        (plan,) = wire.decode_step(wire.encode_step(step), CONFIG).plans
        masked = np.count_nonzero(plan.row_flags & RowFlag.MASK)
        assert (0 if plan.allowed_masks is None else len(plan.allowed_masks)) == masked


def assert_same(mine: object, theirs: object) -> None:
    if isinstance(theirs, np.ndarray):
        assert isinstance(mine, np.ndarray) and mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)
    else:
        assert mine == theirs
