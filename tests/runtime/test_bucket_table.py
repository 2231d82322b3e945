"""The bucket table's page-row capacities, and how a plan's buffer travels."""

from __future__ import annotations

import pytest

from resin.plan import HistoryGroup, Plane, StateGroup, WindowGroup, plan_geometry
from resin.runtime.bucket_table import MAX_ROW_PAGES, build_buckets, decode_sizes, prefill_sizes

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
