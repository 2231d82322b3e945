"""Small dense products and grouped expert products, interpreted, against float64."""

import functools

import jax
import numpy as np
import pytest

from resin.pallas_kernels.dense_small import dense_small
from resin.pallas_kernels.dense_tiles import DenseTiles, choose_dense_tiles
from resin.pallas_kernels.experts import GroupedTiles, expert_ffn, grouped_product, sort_pairs
from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.gpu import H200
from tests.pallas_kernels.paged_cases import relative_error
from tests.pallas_kernels.references import dense_small_ref, expert_ffn_ref


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


GATES = {
    "silu": (SILU, lambda gate, up: silu(gate) * up),
    "gelu_tanh": (Gate("gelu_tanh"), lambda gate, up: gelu_tanh(gate) * up),
    "clamped": (Gate(alpha=1.702, limit=1.5, up_bias=1.0), clamped),
}


@pytest.mark.parametrize(
    "tiles", [None, DenseTiles(32, 32), DenseTiles(16, 16, splits=3), DenseTiles(32, 32, vector=True)]
)
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "norm", "bias", "gate", "residual"),
    [
        (1, 64, 96, True, False, None, False),
        (4, 72, 80, True, False, "silu", False),
        (3, 100, 50, False, True, None, True),
        (2, 128, 64, True, False, "gelu_tanh", False),
        (2, 48, 72, True, True, "clamped", False),
    ],
)
def test_dense_matches_float64(rows, inner, columns, norm, bias, gate, residual, tiles):
    x, weight = 3 * normal(1, rows, inner), normal(2, inner, columns)
    scale = normal(3, inner) if norm else None
    added = normal(4, rows, columns) if residual else None
    biases = normal(5, columns) if bias else None
    function = dense_small_ref if tiles is None else functools.partial(dense_small, tiles=tiles, interpret=True)
    call = {"norm": scale, "eps": 1e-5, "bias": biases, "gate": GATES[gate][0] if gate else None, "residual": added}
    out, _ = jax.jit(functools.partial(function, **call))(x, weight)
    wide = x.astype(np.float64)
    if norm:
        wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * scale
    expected = wide @ weight.astype(np.float64) + (biases if bias else 0)
    if gate:
        expected = GATES[gate][1](expected[:, : columns // 2], expected[:, columns // 2 :])
    if residual:
        expected = expected + added
    assert relative_error(out, expected) < 2e-6


@pytest.mark.parametrize("rows", [5, 17, 40])
def test_dense_rows_that_fill_no_tile(rows):
    x, weight = normal(1, rows, 64), normal(2, 64, 48)
    out, counters = dense_small(x, weight, counters=np.zeros(8, np.int32), tiles=DenseTiles(16, 16, 2), interpret=True)
    assert relative_error(out, x.astype(np.float64) @ weight) < 2e-6
    assert not np.any(counters)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 4096, 6144), (8, 4096, 6144), (8, 14336, 4096), (8, 64, 64)]
)
def test_chosen_tiles_cover_the_product(rows, inner, columns):
    tiles = choose_dense_tiles(rows, inner, columns, H200, gated=False)
    assert 1 <= tiles.splits * -(-columns // tiles.block_columns) <= 528
    assert not (tiles.vector and rows > 2)


def expert_case(tokens: int, choices: int, experts: int, width: int, inner: int):
    rng = np.random.default_rng(tokens)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    weights = rng.uniform(0, 1, (tokens, choices)).astype(np.float32)
    gate_up, down = normal(5, experts, width, 2 * inner) / 8, normal(6, experts, inner, width) / 8
    return normal(7, tokens, width), ids, weights, gate_up, down


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 2, 8, 64, 48), (5, 3, 8, 64, 48), (40, 2, 4, 100, 40), (3, 3, 3, 32, 32), (300, 2, 4, 32, 16)]
)
def test_experts_match_float64(shape, around, interpret):
    """`around`: with a factor before, a residual after, and pairs of no expert; 300 tokens are sorted by expert."""
    x, ids, weights, gate_up, down = expert_case(*shape)
    if around:
        ids.reshape(-1)[::3] = -1
    factor, residual = (normal(8, shape[0]), normal(9, *x.shape)) if around else (None, None)
    function = functools.partial(expert_ffn, interpret=True) if interpret else expert_ffn_ref
    call = functools.partial(function, factor=factor, residual=residual)
    out = jax.jit(call)(x, ids, weights, gate_up, down)
    wide, expected = x.astype(np.float64), np.zeros(x.shape)
    if around:
        wide, expected = wide * factor[:, None], residual.astype(np.float64)
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert < 0:
                continue
            first, second = np.split(wide[token] @ gate_up[expert], 2)
            expected[token] += weight * ((silu(first) * second) @ down[expert].astype(np.float64))
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("rows", [16, 32])
def test_many_pairs_are_sorted_into_tiles(rows):
    pairs, experts = 600, 7
    ids = np.random.default_rng(0).integers(0, experts - 1, pairs).astype(np.int32)
    x, weight = normal(1, pairs, 32), normal(2, experts, 32, 48)
    tiles = GroupedTiles(rows, 32, 32, num_warps=4, num_stages=2)
    out = jax.jit(functools.partial(grouped_product, pairs_per_row=1, tiles=tiles, interpret=True))(x, weight, ids)
    expected = np.einsum("pk,pkn->pn", x.astype(np.float64), weight.astype(np.float64)[ids])
    assert relative_error(out, expected) < 1e-5


def test_sorted_tiles_hold_each_pair_once():
    ids = np.array([3, 0, 3, 3, 1, 3, 0, 3], np.int32)
    lists = jax.tree.map(np.asarray, sort_pairs(ids, experts=5, tile_rows=2))
    seen = []
    for tile in range(lists.live_tiles[0]):
        begin, end = lists.start[tile], min(lists.start[tile] + 2, lists.end[tile])
        members = lists.pairs[begin:end]
        assert len(members) and set(ids[members]) == {lists.expert[tile]}
        seen += members.tolist()
    assert sorted(seen) == list(range(8))
