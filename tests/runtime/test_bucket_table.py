"""The bucket table's page-row capacities, and how a plan's buffer travels."""

from __future__ import annotations

import numpy as np
import pytest

from resin.plan import HistoryGroup, Phase, Plane, StateGroup, WindowGroup, plan_geometry, plan_layout
from resin.runtime import executable
from resin.runtime.bucket_table import MAX_ROW_PAGES, build_buckets, decode_sizes, prefill_sizes
from tests.runtime.tiny_runner import build_tiny, builder_for, reference_greedy

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
    words = {bucket: plan_layout(bucket, GROUPS, geometry).words for bucket in buckets}
    # Prefill of up to a thousand tokens travels in one piece where contexts are those of a chat.
    short = [bucket for bucket in buckets if bucket.phase is Phase.PREFILL and bucket.tokens <= 1024]
    assert short and (context > 32_768 or all(words[bucket] <= executable.TRANSFER_WORDS for bucket in short))


def test_a_buffer_is_cut_into_views() -> None:
    buffer = np.arange(2 * executable.TRANSFER_WORDS + 5, dtype=np.int32)
    pieces = executable.cut_buffer(buffer)
    assert [len(piece) for piece in pieces] == [executable.TRANSFER_WORDS] * 2 + [5]
    assert all(np.shares_memory(piece, buffer) for piece in pieces)
    np.testing.assert_array_equal(np.concatenate(pieces), buffer)
    assert [len(piece) for piece in executable.cut_buffer(buffer[: executable.TRANSFER_WORDS])] == [executable.TRANSFER_WORDS]


def test_plans_in_many_pieces_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts within columns: 37 words divide nothing."""
    monkeypatch.setattr(executable, "TRANSFER_WORDS", 37)
    runner = build_tiny("llama", decode_sequences=(4,), prefill_tokens=(32,))
    builder = builder_for(runner)
    prompt = np.random.default_rng(0).integers(3, 256, 23).tolist()
    sequence = builder.sequence(1, prompt)
    plan = builder.prefill([(sequence, 23)])
    assert len(executable.cut_buffer(plan.buffer)) > 5
    sequence.tokens += runner.forward(plan).token_ids.tolist()
    for _ in range(4):
        sequence.tokens += runner.forward(builder.decode([sequence])).token_ids.tolist()
    assert sequence.tokens[23:] == reference_greedy("llama", prompt, 5)
