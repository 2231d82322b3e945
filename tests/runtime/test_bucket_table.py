"""The bucket table's page-row capacities, and how a plan's buffer travels."""

from __future__ import annotations

import pytest

from resin.plan import HistoryGroup, Plane, StateGroup, WindowGroup, plan_geometry
from resin.runtime.bucket_table import MAX_ROW_PAGES, build_buckets, decode_sizes, prefill_sizes, sequences_that_fit

GROUPS = (
    HistoryGroup("history", (Plane("kv", 32, 64),)),
    WindowGroup("window", (Plane("kv", 32, 64),), 128),
    StateGroup("state", (Plane("conv", 40, 64),)),
)


@pytest.mark.parametrize("context", [4096, 32_768, 1 << 20])
def test_every_bucket_holds_one_full_sequence_and_no_more_than_its_cap(context: int) -> None:
    geometry = plan_geometry(GROUPS, arena_dtype="bfloat16", page_tokens=16)
    buckets = build_buckets(
        GROUPS,
        geometry,
        decode_sequences=decode_sizes("gpu", 512),
        prefill_tokens=prefill_sizes("gpu", 8192),
        prefill_sequences=16,
        max_context_tokens=context,
    )
    whole = context // 16
    for bucket in buckets:
        history, window, state = bucket.row_pages
        assert history == max(whole, min(bucket.sequences * whole, MAX_ROW_PAGES[bucket.phase]))
        assert window <= bucket.sequences * 10 + bucket.tokens // 16 + 1
        assert state == bucket.sequences * geometry.groups[2].pages_per_state


@pytest.mark.parametrize(
    ("room_gib", "context", "most"),
    [(0.001, 32_768, 1), (0.3, 32_768, 16), (2, 32_768, 96), (90, 32_768, 256), (0.3, 512, 96)],
)
def test_a_gpu_runs_as_many_sequences_as_its_memory_holds(room_gib: float, context: int, most: int) -> None:
    """Of 4096 tokens, here 18 MB: some are longer, most are shorter; never more than 256."""
    geometry = plan_geometry(GROUPS, arena_dtype="bfloat16", page_tokens=16)
    found = sequences_that_fit(GROUPS, geometry, context, int(room_gib * 2**30))
    assert found == most
