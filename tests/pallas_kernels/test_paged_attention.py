"""Paged decode and prefill attention, interpreted, against dense float64 attention."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from resin.pallas_kernels.paged_decode import DecodeTiles, paged_decode_attention
from resin.pallas_kernels.paged_prefill import PrefillTiles, paged_prefill_attention
from resin.pallas_kernels.paged_ref import paged_decode_attention_ref, paged_prefill_attention_ref
from resin.plan import InvalidRequest
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    build_case,
    by_sequence,
    dense_attention,
    dense_softmax,
    merge,
    relative_error,
)

LENGTHS = [1, 17, 150, 5, 70]
# heads, kv_heads, width, page_entries, window, sinks, softcap
SHAPES = [
    (9, 3, 64, 16, None, False, None),
    (4, 4, 80, 8, 20, True, None),
    (7, 1, 128, 16, 5, True, 30.0),
    (16, 1, 96, 32, None, True, None),
    (4, 2, 256, 24, 100, False, 50.0),
]


def with_shapes(*choices):
    """Every shape with every choice; interpreted kernels (a choice but None) run the last two among the slow tests."""
    return [
        pytest.param(shape, choice, marks=[pytest.mark.slow] if choice is not None and shape in SHAPES[3:] else [])
        for choice in choices
        for shape in SHAPES
    ]


def options(case: PagedCase, window: int | None, sinks: bool, softcap: float | None) -> dict:
    logits = np.random.default_rng(9).standard_normal(case.q.shape[1]).astype(np.float32) if sinks else None
    return {"window": window, "sinks": logits, "softcap": softcap}


def run_decode(case: PagedCase, function, chosen: dict, **extra):
    """`[B, H, D]` of one query a sequence, and the counters."""
    out, _, counters = run_queries(case, case.q[:, None], function, chosen, **extra)
    return out[:, 0], counters


def run_queries(case: PagedCase, q, function, chosen: dict, **extra):
    """`[B, Q, H, D]`, the logarithms of denominators and the counters."""
    call = functools.partial(
        function, kv_heads=case.kv_heads, page_entries=case.page_entries, scale=case.scale, **chosen, **extra
    )
    columns = (q, case.arena, case.page_indptr, case.page_ids, case.seq_lens, case.first_position)
    return jax.jit(call)(*columns, case.key_row, case.value_row)


def run_prefill(case: PagedCase, function, chosen: dict, **extra):
    """`[T, H, D]` and the logarithms of denominators."""
    call = functools.partial(
        function, kv_heads=case.kv_heads, page_entries=case.page_entries, scale=case.scale, **chosen, **extra
    )
    columns = (case.page_indptr, case.page_ids, case.query_indptr, case.seq_lens, case.first_position)
    return jax.jit(call)(case.q, case.arena, *columns, case.key_row, case.value_row)


@pytest.mark.parametrize(("shape", "splits"), with_shapes(None, 3))
def test_decode_matches_dense_attention(shape, splits):
    heads, kv_heads, width, entries, window, sinks, softcap = shape
    case = build_case(
        LENGTHS, [1] * 5, heads=heads, kv_heads=kv_heads, width=width, page_entries=entries, window=window
    )
    chosen = options(case, window, sinks, softcap)
    if splits is None:
        out, _ = run_decode(case, paged_decode_attention_ref, chosen)
    else:
        out, _ = run_decode(case, paged_decode_attention, chosen, tiles=DecodeTiles(32, splits), interpret=True)
    assert relative_error(out, dense_attention(case, **chosen)) < 1e-6


def test_decode_counters_come_back_as_zeros_and_serve_the_next_layer():
    case = build_case(LENGTHS, [1] * 5, heads=4, kv_heads=2, width=64, page_entries=16)
    zeros = np.zeros(5 * 2, np.int32)
    tiles = DecodeTiles(32, 4)
    once, counters = run_decode(case, paged_decode_attention, {}, counters=zeros, tiles=tiles, interpret=True)
    assert not np.any(counters)
    again, _ = run_decode(case, paged_decode_attention, {}, counters=counters, tiles=tiles, interpret=True)
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("interpret", [False, True])
def test_padded_sequences_decode_to_zeros(interpret):
    case = build_case([40], [1], heads=4, kv_heads=2, width=64, page_entries=16)
    padded = PagedCase(
        **{
            **{name: getattr(case, name) for name in case.__dataclass_fields__},
            "q": np.concatenate([case.q, case.q]),
            "page_indptr": np.array([0, 3, 3], np.int32),
            "seq_lens": np.array([40, 0], np.int32),
            "first_position": np.zeros(2, np.int32),
        }
    )
    function = paged_decode_attention if interpret else paged_decode_attention_ref
    out, _ = run_decode(padded, function, {}, **({"interpret": True} if interpret else {}))
    assert relative_error(out[:1], dense_attention(case)) < 1e-6
    assert not np.any(out[1])


@pytest.mark.parametrize(("shape", "tiles"), with_shapes(None, PrefillTiles(64, 32, parts=2)))
def test_prefill_matches_dense_attention(shape, tiles):
    heads, kv_heads, width, entries, window, sinks, softcap = shape
    case = build_case(
        LENGTHS,
        [1, 10, 40, 5, 1],
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        page_entries=entries,
        window=window,
        padding_tokens=3,
    )
    chosen = options(case, window, sinks, softcap)
    if tiles is None:
        out, lse = run_prefill(case, paged_prefill_attention_ref, chosen, with_lse=True)
    else:
        out, lse = run_prefill(case, paged_prefill_attention, chosen, with_lse=True, tiles=tiles, interpret=True)
    live = case.query_indptr[-1]
    expected, denominators = dense_softmax(case, **chosen)
    assert relative_error(out[:live], expected[:live]) < 1e-6
    np.testing.assert_allclose(lse[:live], denominators[:live], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shape", "tiles"), with_shapes(None, DecodeTiles(32, 3)))
def test_several_queries_a_sequence_match_dense_attention(shape, tiles):
    """Each sees the keys up to its own; sequences have fewer than others, one has none."""
    heads, kv_heads, width, entries, window, sinks, softcap = shape
    live = [1, 8, 5, 2, 3]
    case = build_case(LENGTHS, live, heads=heads, kv_heads=kv_heads, width=width, page_entries=entries, window=window)
    chosen = options(case, window, sinks, softcap)
    expected, denominators = (
        by_sequence(case, part, fill) for part, fill in zip(dense_softmax(case, **chosen), (0.0, -np.inf), strict=True)
    )
    q = by_sequence(case, case.q, np.nan)
    if tiles is None:
        function, extra = paged_decode_attention_ref, {}
    else:
        function, extra = paged_decode_attention, {"tiles": tiles, "interpret": True}
    extra |= {"query_lens": np.array(live, np.int32), "with_lse": True}
    out, lse, counters = run_queries(case, q, function, chosen, **extra)
    assert relative_error(out, expected) < 1e-6
    dead = np.arange(q.shape[1])[None, :] >= np.array(live)[:, None]
    assert not np.any(np.asarray(out)[dead])
    np.testing.assert_allclose(np.asarray(lse)[~dead], denominators[~dead], rtol=0, atol=1e-5)
    if not sinks:
        assert (np.asarray(lse)[dead] == -np.inf).all()
    assert counters is None or not np.any(counters)


def test_more_queries_than_a_program_takes_are_refused():
    for queries, heads in ((9, 4), (5, 64)):
        case = build_case([40], [queries], heads=heads, kv_heads=2, width=32, page_entries=16)
        with pytest.raises(InvalidRequest, match=f"queries.*{queries}"):
            run_queries(case, case.q[None], paged_decode_attention, {}, interpret=True)


@pytest.mark.parametrize("function", [paged_decode_attention_ref, paged_decode_attention])
def test_attention_to_two_key_sets_merges_to_attention_to_both(function):
    """A sequence's first pages, and the others: the sinks of both come in at the merge, or in the kernel, which is one.

    Rows of the call: the first pages of each of two sequences, the others, all.
    """
    case = build_case([70, 49], [1, 1], heads=6, kv_heads=2, width=64, page_entries=16)
    sinks = np.random.default_rng(9).standard_normal(6).astype(np.float32)
    starts, ends = case.page_indptr[:2], case.page_indptr[1:]
    spans = [
        *zip(starts, starts + 2, strict=True),
        *zip(starts + 2, ends, strict=True),
        *zip(starts, ends, strict=True),
    ]
    sets = replace(
        case,
        q=np.tile(case.q, (3, 1, 1)),
        page_ids=np.concatenate([case.page_ids[first:end] for first, end in spans]),
        page_indptr=np.cumsum([0, *(end - first for first, end in spans)]).astype(np.int32),
        seq_lens=np.array([32, 32, 70, 49, 70, 49], np.int32),
        first_position=np.array([0, 0, 32, 32, 0, 0], np.int32),
    )
    extra = {"with_lse": True} | ({"interpret": True} if function is paged_decode_attention else {})
    out, lse, _ = run_queries(sets, sets.q[:, None], function, {}, **extra)
    first, second, whole = ((out[at : at + 2, 0], lse[at : at + 2, 0]) for at in (0, 2, 4))
    own_out, own_lse, _ = run_queries(case, case.q[:, None], function, {"sinks": sinks}, **extra)
    for got, chosen in (
        (merge([first, second]), None),
        (merge([first, second], sinks), sinks),
        (merge([whole], sinks), sinks),
        ((own_out[:, 0], own_lse[:, 0]), sinks),
    ):
        expected, denominators = dense_softmax(case, sinks=chosen)
        assert relative_error(got[0], expected) < 1e-6
        np.testing.assert_allclose(got[1], denominators, rtol=0, atol=1e-5)


@pytest.mark.parametrize("function", [paged_prefill_attention_ref, paged_prefill_attention])
def test_prefill_of_whole_and_chunked_prompts_agree(function):
    whole = build_case([70], [70], heads=4, kv_heads=2, width=64, page_entries=16)
    extra = {"interpret": True} if function is paged_prefill_attention else {}
    full, _ = run_prefill(whole, function, {}, **extra)
    tail = PagedCase(
        **{
            **{name: getattr(whole, name) for name in whole.__dataclass_fields__},
            "q": whole.q[37:],
            "query_indptr": np.array([0, 33], np.int32),
        }
    )
    np.testing.assert_allclose(run_prefill(tail, function, {}, **extra)[0], full[37:], rtol=0, atol=2e-6)
