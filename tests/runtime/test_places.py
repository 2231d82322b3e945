"""Positions, lengths and destinations derived on the device are what the requests lease, whoever runs beside them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin import BatchPlan, Bucket, CacheGroup, Engine, Phase, RowFlag, RunnerConfig, SamplingParams
from resin.plan import plan_layout
from resin.runtime.executable import unpack
from resin.runtime.places import derive
from resin.runtime.slots import SlotTable, abstract_slots
from tests.fakes import VOCAB, OverlapFake, fake_config, history_group, state_group, window_group
from tests.leased_places import leased_places

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "history": (history_group(),),
    "window and state": (window_group(7), state_group(8)),
    "compressed": (history_group(4, rows=8), window_group(9)),
}


@cache
def program(config: RunnerConfig, bucket: Bucket):  # type: ignore[no-untyped-def]
    layout = plan_layout(bucket, config.groups, config.geometry)
    specs = list(zip(config.groups, config.geometry.groups, strict=True))
    return jax.jit(lambda buffer, slots: derive(unpack(layout, buffer), slots, bucket, specs))


def slot_table(config: RunnerConfig, latest: np.ndarray) -> SlotTable:
    shapes = abstract_slots(config, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return replace(zeros, latest=jnp.asarray(np.pad(latest, ((0, 0), (0, 1))), jnp.int32))


def derived(config: RunnerConfig, plan: BatchPlan, latest: np.ndarray) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    columns, tokens = program(config, plan.bucket)(plan.buffer, slot_table(config, latest))
    ids, positions, row, live = map(np.asarray, tokens)
    assert positions.tolist() == np.asarray(columns["positions"]).tolist() and not positions[~live].any()
    for token in np.flatnonzero(live):
        assert plan.query_indptr[row[token]] <= token < plan.query_indptr[row[token] + 1]
    return {name: np.asarray(column) for name, column in columns.items()}, ids


@pytest.mark.parametrize("mix", MIXES)
def test_derived_places_are_leased(mix: str) -> None:
    """Rows of a plan in flight say their length in the slot table alone: the column is made wrong."""
    config = fake_config(MIXES[mix], max_sequences=6, max_context_tokens=64)
    runner, draw, checked = OverlapFake(config), random.Random(len(mix)), []
    engine = Engine(runner, overlap=1, prefix_cache=True)

    def check(plan: BatchPlan) -> None:
        from_slot = (plan.row_flags & RowFlag.FROM_SLOT) != 0
        buffer = plan.buffer.copy()
        plan.layout.view(buffer, "computed")[from_slot] += 1000
        places = leased_places(engine, plan)
        expected_ids = plan.token_ids.copy()
        latest = runner.slots.clip(0, None)
        expected_ids[plan.query_indptr[:-1][from_slot]] = latest[plan.slots[from_slot], 0]
        told = BatchPlan(
            plan.step, plan.bucket, plan.num_sequences, plan.num_tokens, buffer, plan.layout, plan.group_specs
        )
        columns, ids = derived(config, told, latest)
        assert columns["positions"].tolist() == places.positions and columns["seq_lens"].tolist() == places.lengths
        assert ids.tolist() == expected_ids.tolist()
        for name, (pages, offsets) in places.destinations.items():
            assert columns[f"append_pages:{name}"].tolist() == pages, name
            assert columns[f"append_offsets:{name}"].tolist() == offsets, name
        empty = bool((plan.slots[: plan.num_sequences] == config.max_sequences).any())
        checked.append((plan.phase, bool(from_slot.any()), empty))

    runner.check = check
    shared = [draw.randrange(VOCAB) for _ in range(40)]
    with engine:
        for number in range(14):
            params = SamplingParams(max_output_tokens=2 + number % 9, temperature=0)
            engine.submit(shared[: draw.randrange(1, 40)], sampling_params=params)
        while engine.has_work():
            engine.step()
    assert {(Phase.PREFILL, False, False), (Phase.DECODE, True, False), (Phase.DECODE, True, True)} <= set(checked)


def test_a_prefill_bucket_with_more_sequences_than_tokens_of_them() -> None:
    """Sequences of one token, padded sequences and padded tokens side by side."""
    config = fake_config((history_group(),), max_sequences=6)
    bucket = Bucket(Phase.PREFILL, 6, 8, (8,))
    layout = plan_layout(bucket, config.groups, config.geometry)
    buffer = np.zeros(layout.words, np.int32)
    columns = layout.views(buffer)
    columns["query_indptr"][:] = (0, 1, 2, 5, 5, 5, 5)
    columns["computed"][:3] = (0, 7, 3)
    columns["page_indptr:history"][:] = (0, 1, 3, 5, 5, 5, 5)
    columns["page_ids:history"][:5] = (11, 21, 22, 31, 32)
    found, _ = program(config, bucket)(buffer, slot_table(config, np.zeros((7, 2), np.int32)))
    assert found["positions"].tolist() == [0, 7, 3, 4, 5, 0, 0, 0]
    assert found["seq_lens"].tolist() == [1, 8, 6, 0, 0, 0]
    assert found["append_pages:history"].tolist() == [11, 22, 31, 32, 32, 0, 0, 0]
    assert found["append_offsets:history"].tolist() == [0, 3, 3, 0, 1, 0, 0, 0]
