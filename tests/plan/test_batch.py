"""BatchPlan: a frozen view of its buffer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from resin import BatchPlan, Bucket, Phase, RowFlag, RunnerConfig, StateGroup
from resin.plan import build_plan, plan_layout
from resin.plan.layout import Header
from tests.fakes import fake_config, history_group, state_group, window_group

CONFIG = fake_config((history_group(), window_group(9), state_group(16, rows=40)))
BUCKET = Bucket(Phase.PREFILL, 3, 8, (6, 7, 0))


def filled(config: RunnerConfig, bucket: Bucket) -> tuple[np.ndarray, BatchPlan]:
    layout = plan_layout(bucket, config.groups, config.geometry)
    buffer = np.arange(layout.words, dtype=np.int32)
    layout.view(buffer, "header")[:] = Header(2, 5, int(RowFlag.EMIT | RowFlag.LOGPROBS), 4)
    layout.view(buffer, "row_flags")[:] = (RowFlag.EMIT, RowFlag.FRESH_STATE, 0)
    expected = buffer.copy()
    return expected, build_plan(config, bucket, buffer, step=7, request_ids=(3, 4))


def test_a_plan_reads_its_counts_from_the_header() -> None:
    _, plan = filled(CONFIG, BUCKET)
    assert (plan.num_sequences, plan.num_tokens, plan.top_logprobs) == (2, 5, 4)
    assert plan.phase is Phase.PREFILL and plan.step == 7 and plan.request_ids == (3, 4)
    assert plan.emits.tolist() == [True, False], "live rows only"
    assert plan.wants_logprobs


def test_every_property_is_a_read_only_view_of_the_buffer() -> None:
    expected, plan = filled(CONFIG, BUCKET)
    arrays = {name: getattr(plan, name) for name in ("token_ids", "query_indptr", "computed", "slots")}
    arrays |= {name: getattr(plan, name) for name in ("row_flags", "next_token")} | plan.sampling
    for name, array in arrays.items():
        assert np.array_equal(array.view(np.int32), plan.layout.view(expected, name).view(np.int32)), name
        assert np.shares_memory(array, plan.buffer)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        plan.buffer[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.step = 8  # type: ignore[misc]


def test_group_plans_follow_the_kind_of_group() -> None:
    _, plan = filled(CONFIG, BUCKET)
    assert [group.name for group in plan.groups] == ["history", "window", "state"]
    for spec, fill, group in zip(CONFIG.groups, CONFIG.geometry.groups, plan.groups, strict=True):
        paged = (group.page_indptr, group.page_ids, group.first_position)
        state = (group.input_pages, group.output_pages)
        if isinstance(spec, StateGroup):
            assert all(array is None for array in paged)
            assert all(array is not None and array.shape == (3, fill.pages_per_state) for array in state)
        else:
            assert all(array is None for array in state)
            for field, array in zip(("page_indptr", "page_ids", "first_position"), paged, strict=True):
                assert array is not None and np.array_equal(array, plan.column(f"{field}:{spec.name}"))


def test_row_flags_are_distinct_bits() -> None:
    assert len({flag.value for flag in RowFlag}) == len(RowFlag)
    assert all(flag.value.bit_count() == 1 for flag in RowFlag)
