"""The fused head norm, rotation and cache append, interpreted, against plain XLA and NumPy."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from resin.pallas_kernels.rope_append import AppendTiles, rope_append
from tests.pallas_kernels.references import rope_append_ref


def build(tokens: int, heads: int, kv_heads: int, width: int, entries: int, norm: bool):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, heads + 2 * kv_heads, width)).astype(np.float32)
    angles = rng.uniform(-3, 3, (tokens, width // 2))
    pages = tokens // entries + 3
    arena = np.full((pages, 2 * 2 * kv_heads * entries * width), np.nan, np.float32)
    places = rng.permutation(np.arange(entries, pages * entries))[:tokens].astype(np.int32)
    norms = {}
    if norm:
        norms = {name: rng.standard_normal(width).astype(np.float32) for name in ("q_norm", "k_norm")}
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rows = 2 * kv_heads * entries, 3 * kv_heads * entries
    call = {"kv_heads": kv_heads, "page_entries": entries, **norms}
    return (x, cos, sin, arena, places // entries, places % entries, *rows), call


@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 64, 8, True), (5, 9, 3, 64, 16, False), (70, 7, 1, 80, 16, True), (3, 16, 8, 128, 4, True)]
)
def test_matches_the_reference_and_writes_nothing_else(shape):
    arguments, call = build(*shape)
    q, arena, keys = jax.jit(functools.partial(rope_append, **call, interpret=True))(*arguments)
    expected_q, expected_arena, _ = jax.jit(functools.partial(rope_append_ref, **call))(*arguments)
    assert keys is None
    np.testing.assert_allclose(q, expected_q, rtol=0, atol=1e-5)
    np.testing.assert_allclose(arena, expected_arena, rtol=0, atol=1e-5)
    tokens, _, kv_heads, width = shape[:4]
    assert np.count_nonzero(~np.isnan(arena)) == tokens * 2 * kv_heads * width


def test_many_tokens_with_padding_and_keys():
    """300 live tokens and 84 of padding, whose place is page 0."""
    arguments, call = build(384, 6, 2, 64, 16, True)
    x, cos, sin, arena, pages, offsets, *rows = arguments
    live = np.arange(384) < 300
    columns = x, cos, sin, arena, np.where(live, pages, 0), np.where(live, offsets, 0), *rows
    kernel = functools.partial(rope_append, interpret=True)
    (q, held, keys), (expected_q, expected, expected_keys) = (
        jax.jit(functools.partial(function, **call, with_keys=True))(*columns) for function in (kernel, rope_append_ref)
    )
    np.testing.assert_allclose(q, expected_q, rtol=0, atol=1e-5)
    assert keys.shape == (384, 2, 64)
    np.testing.assert_allclose(keys, expected_keys, rtol=0, atol=1e-5)
    np.testing.assert_allclose(held[1:], expected[1:], rtol=0, atol=1e-5)
    assert np.isnan(held[0]).all()
    assert np.count_nonzero(~np.isnan(held)) == 300 * 2 * 2 * 64


@pytest.mark.parametrize("tiles", [AppendTiles(4, 2), AppendTiles(64, 8)], ids=str)
def test_other_tiles(tiles):
    arguments, call = build(37, 5, 1, 64, 16, False)
    results = [
        jax.jit(functools.partial(rope_append, **call, interpret=True, with_keys=True, tiles=chosen))(*arguments)
        for chosen in (tiles, None)
    ]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_reference_rotates_half_split_pairs_and_leaves_values():
    arguments, call = build(4, 4, 2, 64, 8, False)
    x, cos, sin, _, pages, offsets, key_row, value_row = arguments
    q, arena, _ = jax.jit(functools.partial(rope_append_ref, **call))(*arguments)
    pairs = (x[:, :, :32] + 1j * x[:, :, 32:]) * (cos + 1j * sin)[:, None, :]
    turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(q, turned[:, [0, 1, 4, 5]], rtol=0, atol=1e-5)  # each KV head has two
    rows = np.asarray(arena).reshape(arena.shape[0], -1, 64)
    for token in range(4):
        for head in range(2):
            place = head * 8 + offsets[token]
            np.testing.assert_allclose(
                rows[pages[token], key_row + place], turned[token, 4 * head + 2], rtol=0, atol=1e-5
            )
            np.testing.assert_array_equal(rows[pages[token], value_row + place], x[token, 4 * head + 3])


def test_uint16_arena_takes_bfloat16_bits():
    arguments, call = build(5, 4, 2, 64, 8, False)
    x = arguments[0].astype(ml_dtypes.bfloat16)
    zeros = np.zeros(arguments[3].shape, ml_dtypes.bfloat16)
    plain = jax.jit(functools.partial(rope_append_ref, **call))(x, *arguments[1:3], zeros, *arguments[4:])
    bits = np.zeros(arguments[3].shape, np.uint16)
    for function in (rope_append_ref, functools.partial(rope_append, interpret=True)):
        _, arena, _ = jax.jit(functools.partial(function, **call))(x, *arguments[1:3], bits, *arguments[4:])
        assert arena.dtype == np.uint16
        np.testing.assert_allclose(
            np.asarray(arena).view(ml_dtypes.bfloat16).astype(np.float32), np.asarray(plain[1], np.float32), atol=0.02
        )
