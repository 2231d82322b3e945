"""Every kernel on a GPU against its XLA reference: fresh inputs, poisoned memory, an arena beyond 2^31 elements."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.pallas_kernels.dense_small import dense_small
from resin.pallas_kernels.draw import sample_tokens_ref
from resin.pallas_kernels.experts import expert_ffn
from resin.pallas_kernels.experts_packed import packed_expert_ffn
from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.heads import split_heads
from resin.pallas_kernels.mxfp4 import PackedMatrices, pack_factors, pack_words, scale_shift
from resin.pallas_kernels.paged_decode import MAX_ROWS, paged_decode_attention
from resin.pallas_kernels.paged_prefill import paged_prefill_attention
from resin.pallas_kernels.paged_ref import paged_decode_attention_ref, paged_prefill_attention_ref
from resin.pallas_kernels.rope_append import rope_append
from resin.pallas_kernels.route import RouteRule, route_tokens, route_tokens_ref
from resin.pallas_kernels.sampling import sample_tokens
from resin.pallas_kernels.shift_state import shift_state
from resin.pallas_kernels.table import pick_kernels
from resin.plan import RowFault
from tests.full.pallas_kernels.test_sampling import build_draw, build_logits
from tests.pallas_kernels.grid import (
    BF16_ERROR,
    FP8_GRID,
    GRID,
    Point,
    check_append,
    check_decode,
    check_prefill,
    check_project_heads,
    fresh_seed,
    poison_memory,
)
from tests.pallas_kernels.paged_cases import PagedCase, build_case, relative_error
from tests.pallas_kernels.references import dense_small_ref, expert_ffn_ref, rope_append_ref
from tests.pallas_kernels.state_cases import check_shift_state

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_gpu():
    if jax.default_backend() == "cpu":
        pytest.skip("no CUDA device")


def bfloat(values: np.ndarray) -> jax.Array:
    return jnp.asarray(values, jnp.bfloat16)


def call_attention(function, case: PagedCase, columns, chosen: dict, **extra):
    """The result alone, `[T, H, D]`."""
    decodes = function in (paged_decode_attention, paged_decode_attention_ref)
    query = bfloat(case.q[:, None] if decodes else case.q)
    call = functools.partial(
        function, kv_heads=case.kv_heads, page_entries=case.page_entries, scale=case.scale, **chosen, **extra
    )
    out = jax.jit(call)(query, bfloat(case.arena), *columns, case.key_row, case.value_row)[0]
    return out[:, 0] if decodes else out


@pytest.mark.parametrize("point", [*GRID, *FP8_GRID], ids=str)
def test_decode(point: Point):
    check_decode(point, [1, 17, 1300, 5, 129, 640], interpret=False)


@pytest.mark.parametrize("point", [*GRID, *FP8_GRID], ids=str)
def test_decode_of_several_queries(point: Point):
    queries = min((2, 3, 5, 8)[point.index % 4], MAX_ROWS // point.ratio)
    check_decode(point, [1, 17, 1300, 5, 129, 640], interpret=False, queries=queries)


@pytest.mark.parametrize("point", [*GRID, *FP8_GRID], ids=str)
def test_project_heads(point: Point):
    check_project_heads(point, (1, 5, 16, 33, 64)[point.index % 5], interpret=False)


@pytest.mark.parametrize("point", [*GRID, *FP8_GRID], ids=str)
def test_prefill(point: Point):
    # The last chunk starts an entry before a block begins: its first row sees nothing of the block that comes first.
    check_prefill(point, [1, 170, 300, 250, 129, 191], [1, 100, 40, 250, 1, 128], interpret=False)


@pytest.mark.parametrize("point", [*GRID[::3], *FP8_GRID[::3]], ids=str)
def test_append(point: Point):
    check_append(point, (1, 5, 130, 3000)[point.index % 4], interpret=False)


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_fresh_prefill(tokens: int):
    """The 8B's heads; a tenth of the tokens is padding, as large as what it must not touch."""
    live = tokens - tokens // 10
    seed = fresh_seed()
    case = build_case([live], [live], heads=32, kv_heads=8, width=128, page_entries=16, seed=seed)
    padding = np.full((tokens - live, 32, 128), 1e3, np.float32)
    query, key, value = (
        bfloat(np.concatenate([part, padding[:, : part.shape[1]]])) for part in (case.q, case.keys[0], case.values[0])
    )
    attend = jax.jit(functools.partial(pick_kernels("cuda").fresh_prefill, scale=case.scale))
    poison_memory()
    out = attend(query, key, value)
    columns = (case.page_indptr, case.page_ids, case.query_indptr, case.seq_lens, case.first_position)
    expected = call_attention(paged_prefill_attention_ref, case, columns, {})
    assert out.shape == query.shape
    assert relative_error(out[:live], np.asarray(expected, np.float64)) < BF16_ERROR, f"seed {seed}"
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_append_of_a_large_batch_leaves_scratch_alone():
    """3000 tokens at the 8B's heads, the last 500 of them padding."""
    tokens, live, heads, kv_heads, width, entries = 3000, 2500, 32, 8, 128, 16
    keys = jax.random.split(jax.random.key(fresh_seed()), 2)
    x = jax.random.normal(keys[0], (tokens, heads + 2 * kv_heads, width), jnp.bfloat16)
    angles = jax.random.uniform(keys[1], (tokens, width // 2), maxval=6.0)
    arena = jnp.full((tokens // entries + 2, 2 * kv_heads * entries * width), jnp.nan, jnp.bfloat16)
    place = jnp.where(jnp.arange(tokens) < live, jnp.arange(tokens, dtype=jnp.int32) + entries, 0)
    columns = (x, jnp.cos(angles), jnp.sin(angles), arena, place // entries, place % entries, 0, kv_heads * entries)
    call = {"kv_heads": kv_heads, "page_entries": entries, "with_keys": True}
    poison_memory()
    out = jax.jit(functools.partial(rope_append, **call))(*columns)
    expected = jax.jit(functools.partial(rope_append_ref, **call))(*columns)
    for part, other in zip((out[0], out[2]), (expected[0], expected[2]), strict=True):
        assert relative_error(part, np.asarray(other, np.float64)) < BF16_ERROR
    held, other = (np.asarray(result[1][1:], np.float64) for result in (out, expected))
    np.testing.assert_array_equal(np.isnan(held), np.isnan(other))
    assert relative_error(np.nan_to_num(held), np.nan_to_num(other)) < BF16_ERROR
    assert np.isnan(np.asarray(out[1][0], np.float32)).all()


def test_attention_and_append_at_the_far_end_of_a_large_arena():
    heads, kv_heads, width, entries, layers = 8, 2, 128, 16, 8
    page_elements = layers * 2 * kv_heads * entries * width
    pages = (1 << 32) // page_elements + 64  # 2^32 elements: past both 32-bit limits
    arena = jnp.full((pages, page_elements), jnp.nan, jnp.bfloat16)
    tokens, ids = 200, jnp.arange(pages - 14, pages - 1, dtype=jnp.int32)[::-1]
    joined = bfloat(np.random.default_rng(0).standard_normal((tokens, heads + 2 * kv_heads, width)))
    turn = jnp.ones((tokens, width // 2), jnp.float32), jnp.zeros((tokens, width // 2), jnp.float32)
    place = jnp.arange(tokens, dtype=jnp.int32)
    stride = kv_heads * entries
    rows = (2 * layers - 2) * stride, (2 * layers - 1) * stride
    append = functools.partial(rope_append, kv_heads=kv_heads, page_entries=entries)
    query, arena, _ = jax.jit(append, donate_argnums=3)(
        joined, *turn, arena, ids[place // entries], place % entries, *rows
    )
    indptr, length, first = jnp.array([0, 13], jnp.int32), jnp.array([tokens], jnp.int32), jnp.zeros(1, jnp.int32)
    chosen = {"kv_heads": kv_heads, "page_entries": entries, "scale": width**-0.5}
    prefill = jax.jit(functools.partial(paged_prefill_attention, **chosen))
    whole, _ = prefill(query, arena, indptr, ids, jnp.array([0, tokens], jnp.int32), length, first, *rows)
    decode = jax.jit(functools.partial(paged_decode_attention, **chosen))
    last, *_ = decode(query[-1:, None], arena, indptr, ids, length, first, *rows)
    key, value = (np.asarray(part, np.float64) for part in split_heads(joined, kv_heads)[1:])
    key, value = (np.repeat(part, heads // kv_heads, axis=1) for part in (key, value))
    scores = np.einsum("thd,nhd->htn", np.asarray(query, np.float64), key) * width**-0.5
    weights = np.exp(np.where(np.tri(tokens, dtype=bool), scores, -np.inf))
    expected = np.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdims=True), value)
    assert relative_error(whole, expected) < BF16_ERROR
    assert relative_error(last[:, 0], expected[-1:]) < BF16_ERROR


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "gate"),
    [
        (1, 4096, 6144, None),
        (4, 1024, 6144, SILU),
        (2, 1024, 6144, Gate(alpha=1.702, limit=2.0, up_bias=1.0)),
        (7, 576, 1536, None),
        (16, 4096, 4096, Gate("gelu_tanh")),
        (33, 2048, 1000, None),
        (1, 4096, 4096, None),
        (8, 4096, 4096, None),
    ],
)
def test_dense(rows, inner, columns, gate):
    """Without a gate, a residual."""
    keys = jax.random.split(jax.random.key(fresh_seed()), 5)
    x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    norm = 1 + jax.random.normal(keys[1], (inner,), jnp.bfloat16) / 4
    weight = jax.random.normal(keys[2], (inner, columns), jnp.bfloat16) * inner**-0.5
    residual = None if gate else jax.random.normal(keys[3], (rows, columns), jnp.bfloat16)
    bias = jax.random.normal(keys[4], (columns,), jnp.bfloat16)
    call = {"norm": norm, "bias": bias, "gate": gate, "residual": residual}
    poison_memory()
    out, _ = jax.jit(functools.partial(dense_small, **call))(x, weight)
    expected, _ = jax.jit(functools.partial(dense_small_ref, **call))(x, weight)
    assert relative_error(out, np.asarray(expected, np.float64)) < BF16_ERROR


@pytest.mark.parametrize(
    "rule", [RouteRule(8), RouteRule(8, renormalise=True), RouteRule(4, "sigmoid", True, 2.5)], ids=str
)
@pytest.mark.parametrize(
    ("rows", "inner", "experts"), [(1, 2048, 128), (2, 2880, 32), (7, 2048, 60), (33, 2048, 128), (64, 1000, 256)]
)
def test_route(rows, inner, experts, rule):
    """Weights against the reference; ids by the scores behind them, because near ties may fall either way."""
    keys = jax.random.split(jax.random.key(fresh_seed()), 4)
    x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    gate = jax.random.normal(keys[1], (inner, experts), jnp.bfloat16) * inner**-0.5
    norm = 1 + jax.random.normal(keys[2], (inner,), jnp.bfloat16) / 4
    bias = jax.random.normal(keys[3], (experts,), jnp.float32) / 8
    biases = {"selection_bias" if rule.share == "sigmoid" else "bias": bias}
    call = {"rule": rule, "norm": norm, **biases, "live": jnp.ones(rows, jnp.int32)}
    counters = jnp.zeros(4, jnp.int32)
    poison_memory()
    kernel = jax.jit(functools.partial(route_tokens, **call))
    for _ in range(3):
        ids, weights, normed, counters = kernel(x, gate, counters=counters)
    expected_ids, expected, expected_normed, _ = jax.jit(functools.partial(route_tokens_ref, **call))(x, gate)
    assert not np.any(counters)
    assert relative_error(normed.whole(), np.asarray(expected_normed.x, np.float64)) < BF16_ERROR
    ids, chosen = np.sort(np.asarray(ids), axis=1), np.sort(np.asarray(expected_ids), axis=1)
    assert (np.diff(ids, axis=1) > 0).all() and ids.min() >= 0 and ids.max() < experts
    assert (ids == chosen).mean() > 0.95
    assert relative_error(np.sort(weights, axis=1), np.sort(np.asarray(expected, np.float64), axis=1)) < 2 * BF16_ERROR


def test_route_takes_equal_scores_and_padding_as_the_reference():
    x = jnp.eye(16, 256, dtype=jnp.bfloat16)
    gate = bfloat(np.random.default_rng(fresh_seed()).integers(0, 3, (256, 128)))
    live = jnp.array([1, 1, 0] * 5 + [1], jnp.int32)
    for rows in (1, 2, 16):
        call = {"rule": RouteRule(8), "live": live[:rows]}
        ids, *_ = jax.jit(functools.partial(route_tokens, **call))(x[:rows], gate)
        expected, *_ = jax.jit(functools.partial(route_tokens_ref, **call))(x[:rows], gate)
        np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 32, 4), (33, 16, 2), (300, 8, 4)])
def test_experts(tokens, experts, choices, around):
    """`around`: with a factor before and a residual after."""
    keys = jax.random.split(jax.random.key(fresh_seed()), 6)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[0], (tokens, experts))), choices)
    x = jax.random.normal(keys[1], (tokens, 512), jnp.bfloat16)
    gate_up = jax.random.normal(keys[2], (experts, 512, 2 * 384), jnp.bfloat16) * 512**-0.5
    down = jax.random.normal(keys[3], (experts, 384, 512), jnp.bfloat16) * 384**-0.5
    columns = (x, ids.astype(jnp.int32), weights, gate_up, down)
    call = {}
    if around:
        factor = jax.random.uniform(keys[4], (tokens,), jnp.float32, 0.5, 2.0)
        call = {"factor": factor, "residual": jax.random.normal(keys[5], x.shape, jnp.bfloat16)}
    poison_memory()
    out, expected = (jax.jit(functools.partial(each, **call))(*columns) for each in (expert_ffn, expert_ffn_ref))
    assert relative_error(out, np.asarray(expected, np.float64)) < 2 * BF16_ERROR


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "width"),
    [
        (1, 32, 2880, 2880),
        (3, 8, 512, 96),
        (8, 32, 2880, 2880),
        (33, 16, 320, 512),
        (64, 32, 2880, 2880),
        (128, 32, 2880, 2880),
        (200, 32, 320, 96),
        (300, 5, 96, 416),
        (2048, 32, 2880, 2880),
    ],
)
def test_packed_experts(tokens, experts, hidden, width):
    """Every code, and scales on both sides of what a factor holds without a shift."""
    rng = np.random.default_rng(fresh_seed())
    matrices = []
    for rows, inner in ((2 * width, hidden), (hidden, width)):
        blocks = rng.integers(0, 256, (experts, rows, inner // 32, 16)).astype(np.uint8)
        centre = int(127 - np.log2(2.93 * inner**0.5)) + (0 if rows == hidden else 12)
        scales = rng.integers(centre - 2, centre + 2, (experts, rows, inner // 32)).astype(np.uint8)
        matrices.append(
            PackedMatrices(
                jnp.stack([pack_words(each) for each in blocks]),
                jnp.stack([pack_factors(each) for each in scales]),
                jnp.array([2.0 ** scale_shift(each) for each in scales], jnp.float32),
            )
        )
    keys = jax.random.split(jax.random.key(fresh_seed()), 6)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[0], (tokens, experts))), 4)
    x = jax.random.normal(keys[1], (tokens, hidden), jnp.bfloat16) * 2.0**-12
    shapes = (experts, 2 * width), (experts, hidden)
    biases = tuple(jax.random.normal(*each, jnp.bfloat16) for each in zip(keys[2:4], shapes, strict=True))
    factor = jax.random.uniform(keys[4], (tokens,), jnp.float32, 0.5, 2.0)
    call = {"biases": biases, "factor": factor, "gate": Gate(alpha=1.702, limit=7.0, up_bias=1.0)}
    call["residual"] = jax.random.normal(keys[5], x.shape, jnp.bfloat16)
    poison_memory()
    columns = (x, ids.astype(jnp.int32), weights, *matrices)
    out, expected = (jax.jit(functools.partial(each, **call))(*columns) for each in (packed_expert_ffn, expert_ffn_ref))
    assert relative_error(out, np.asarray(expected, np.float64)) < 2 * BF16_ERROR


@pytest.mark.parametrize("vocab", [5000, 200_000])
@pytest.mark.parametrize("ties", [False, True])
def test_sampling(vocab, ties):
    logits, draw = build_logits(32, vocab, ties=ties), build_draw(32, vocab)
    out, expected = (np.asarray(jax.jit(each)(logits, draw)) for each in (sample_tokens, sample_tokens_ref))
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "uint16"), ("float32", "float32")], ids=str)
@pytest.mark.parametrize(
    ("taps", "lengths", "width"),
    [(2, (1,), 2048), (2, (1,) * 32, 2048), (3, (5, 1, 2, 0, 700), 1000), (1, (3, 0, 1), 64), (6, (2, 1, 9), 300)],
)
def test_shift_state(dtypes, taps, lengths, width):
    check_shift_state(*dtypes, taps, lengths, width=width, pages=200)
    check_shift_state(*dtypes, taps, lengths, width=width, pages=200, in_place=np.ones(len(lengths), bool))
    check_shift_state(*dtypes, taps, (4,) * 5, width=width, pages=400, copies=4)


def test_a_state_at_the_far_end_of_a_large_arena():
    width, rows = 2048, 64
    pages = (1 << 32) // (rows * width) + 64  # 2^32 elements: past both 32-bit limits
    arena = jnp.full((pages, rows * width), jnp.nan, jnp.bfloat16)
    state, indptr = jnp.array([pages - 1, pages - 3], jnp.int32), jnp.array([0, 5, 9], jnp.int32)
    x = bfloat(np.random.default_rng(fresh_seed()).standard_normal((9, width)))
    shift = jax.jit(functools.partial(shift_state, taps=2), donate_argnums=1)
    held, arena = shift(x, arena, state, state, indptr, jnp.ones(2, jnp.bool_), rows - 2)
    assert not np.any(held)
    held, arena = shift(x, arena, state, state, indptr, jnp.zeros(2, jnp.bool_), rows - 2)
    np.testing.assert_array_equal(held, np.asarray(x)[np.array([[3, 4], [7, 8]])])


@pytest.mark.parametrize("vocab", [300, 200_000])
def test_rows_without_a_token(vocab):
    logits, draw = build_logits(16, vocab, ties=False), build_draw(16, vocab)
    logits[8:, vocab - 1] = np.nan
    logits[0:8:2] = -np.inf
    tokens = np.asarray(jax.jit(sample_tokens)(logits, draw))
    np.testing.assert_array_equal(tokens, np.asarray(jax.jit(sample_tokens_ref)(logits, draw)))
    assert (tokens[8:] == RowFault.NOT_FINITE).all() and (tokens[0:8:2] == RowFault.NO_TOKEN).all()


def test_decode_agrees_with_the_reference_on_the_same_device():
    case = build_case([900, 33], [1, 1], heads=32, kv_heads=8, width=128, page_entries=16)
    columns = (case.page_indptr, case.page_ids, case.seq_lens, case.first_position)
    out = call_attention(paged_decode_attention, case, columns, {})
    expected = call_attention(paged_decode_attention_ref, case, columns, {})
    assert relative_error(out, np.asarray(expected, np.float64)) < BF16_ERROR


def test_prefill_agrees_with_the_reference_on_the_same_device():
    case = build_case([900, 33], [700, 33], heads=32, kv_heads=8, width=128, page_entries=16)
    columns = (case.page_indptr, case.page_ids, case.query_indptr, case.seq_lens, case.first_position)
    out = call_attention(paged_prefill_attention, case, columns, {})
    expected = call_attention(paged_prefill_attention_ref, case, columns, {})
    assert relative_error(out, np.asarray(expected, np.float64)) < BF16_ERROR
