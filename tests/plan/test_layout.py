"""The packed buffer of a plan: every word belongs to exactly one column, and floats travel bit-cast."""

from __future__ import annotations

import numpy as np
import pytest

from resin import Bucket, CacheGroup, Phase, StateGroup, plan_geometry
from resin.plan import plan_layout
from resin.plan.layout import HEADER, KEPT_COLUMNS, SEQUENCE_FLOATS, SEQUENCE_INTS
from tests.fakes import history_group, state_group, window_group

MIXES: dict[str, tuple[CacheGroup, ...]] = {
    "none": (),
    "history": (history_group(),),
    "all": (history_group(), window_group(9), state_group(16, rows=40)),
    "state first": (state_group(16, rows=40), history_group(4, rows=8)),
}


@pytest.mark.parametrize("mix", sorted(MIXES))
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (3, 7), (4, 32)])
def test_columns_tile_the_buffer(mix: str, sequences: int, tokens: int) -> None:
    groups = MIXES[mix]
    geometry = plan_geometry(groups, arena_dtype="float32", page_tokens=4 if groups else None)
    pages = tuple(0 if isinstance(group, StateGroup) else 5 + i for i, group in enumerate(groups))
    layout = plan_layout(Bucket(Phase.PREFILL, sequences, tokens, pages), groups, geometry)
    buffer = np.zeros(layout.words, np.int32)
    for i, column in enumerate(layout.columns):
        view = layout.view(buffer, column.name)
        assert view.shape == (column.length,) and view.dtype == column.dtype
        assert not view.any(), "columns overlap"
        view[:] = i + 1
    assert layout.columns[0].name == "header" and layout.columns[0].length == len(HEADER)
    assert np.count_nonzero(buffer) == layout.words, "words that belong to no column"

    def length(name: str) -> int:
        return layout.by_name[name].length

    assert length("token_ids") == tokens
    assert length("query_indptr") == sequences + 1
    for name in (*SEQUENCE_INTS, *SEQUENCE_FLOATS):
        assert length(name) == sequences
        assert layout.by_name[name].dtype == ("float32" if name in SEQUENCE_FLOATS else "int32")
    for group, fill, row_pages in zip(groups, geometry.groups, pages, strict=True):
        name = group.name
        if isinstance(group, StateGroup):
            assert length(f"input_pages:{name}") == length(f"output_pages:{name}") == sequences * fill.pages_per_state
        else:
            assert (length(f"page_ids:{name}"), length(f"page_indptr:{name}")) == (row_pages, sequences + 1)
            assert length(f"first_position:{name}") == sequences


def test_what_decode_rows_keep_is_one_block() -> None:
    layout = plan_layout(Bucket(Phase.DECODE, 3, 3, ()), (), plan_geometry((), arena_dtype="float32"))
    buffer = np.arange(layout.words, dtype=np.int32)
    for row, name in zip(layout.kept(buffer), KEPT_COLUMNS, strict=True):
        assert row.tolist() == layout.view(buffer, name).view(np.int32).tolist() and np.shares_memory(row, buffer)


def test_the_header_says_where_its_words_lie() -> None:
    assert HEADER._asdict() == {"num_sequences": 0, "num_tokens": 1, "any_flags": 2, "top_logprobs": 3}


def test_floats_keep_their_bits() -> None:
    layout = plan_layout(Bucket(Phase.DECODE, 4, 4, ()), (), plan_geometry((), arena_dtype="float32"))
    buffer = np.zeros(layout.words, np.int32)
    values = np.array([np.nan, -0.0, 1e-38, 3.5], np.float32)
    layout.view(buffer, "temperature")[:] = values
    column = layout.by_name["temperature"]
    words = buffer[column.offset : column.offset + 4]
    assert np.array_equal(words, values.view(np.int32))
    views = layout.views(buffer)
    assert set(views) == set(layout.by_name) and np.array_equal(views["temperature"], values, equal_nan=True)


def test_a_layout_is_made_once_for_each_shape() -> None:
    geometry = plan_geometry((), arena_dtype="float32")
    first = plan_layout(Bucket(Phase.DECODE, 4, 4, ()), (), geometry)
    assert plan_layout(Bucket(Phase.DECODE, 4, 4, ()), [], geometry) is first
    assert plan_layout(Bucket(Phase.DECODE, 5, 5, ()), (), geometry).words > first.words
