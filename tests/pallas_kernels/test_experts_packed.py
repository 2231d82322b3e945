"""Experts packed as MXFP4 against float64 over decoded matrices: few tokens, many, one; every option."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.assemblies import whole
from resin.models.loading.formats.mxfp4 import dequantise_mxfp4
from resin.models.packed import Factors, PackedRows, Units, Words
from resin.pallas_kernels.experts_mxfp4 import FragmentTiles, packed_product, sort_rows
from resin.pallas_kernels.experts_packed import FEW_PAIRS, packed_expert_ffn
from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.mxfp4 import PackedMatrices, packed_shapes
from tests.pallas_kernels.references import expert_ffn_ref

GATES = [Gate(), Gate(alpha=1.702, limit=2.0, up_bias=1.0), Gate("gelu_tanh")]


def random_matrices(
    rng: np.random.Generator, experts: int, rows: int, inner: int, interleaved: bool
) -> tuple[PackedMatrices, np.ndarray]:
    """Packed from a checkpoint's tensors, and float64 `[E, rows, inner]` in the checkpoint's order of rows."""
    blocks = rng.integers(0, 256, (experts, rows, inner // 32, 16)).astype(np.uint8)
    centre = int(127 - np.log2(2.93 * inner**0.5))
    scales = rng.integers(centre - 1, centre + 2, (experts, rows, inner // 32)).astype(np.uint8)
    order = PackedRows(inner, interleaved)
    parts = []
    for assembly, tensor, shape, dtype in zip(
        (Words(order), Factors(order), Units(rows, order)),
        (blocks, scales, scales),
        packed_shapes(experts, rows, inner),
        ("int32", "int32", "float32"),
        strict=True,
    ):
        assert assembly.source_shapes(shape) == (tensor.shape,)
        out = np.empty(shape, dtype)
        assembly.fill(out, [tensor], whole(shape))
        parts.append(jnp.asarray(out))
    return PackedMatrices(*parts), dequantise_mxfp4(blocks, scales).astype(np.float64).swapaxes(1, 2)


def expected(x, ids, weights, gate_up, down, gate, biases, factor, residual) -> np.ndarray:
    out = np.asarray(residual, np.float64).copy() if residual is not None else np.zeros(x.shape)
    for token, (chosen, shares) in enumerate(zip(ids, weights, strict=True)):
        row = np.asarray(x[token], np.float64) * (1.0 if factor is None else float(factor[token]))
        for expert, share in zip(chosen, shares, strict=True):
            if expert < 0:
                continue
            joined = gate_up[expert] @ row
            first, second = joined[0::2], joined[1::2]
            if biases is not None:
                up_bias, down_bias = (np.asarray(bias[expert], np.float64) for bias in biases)
                first, second = first + up_bias[: len(first)], second + up_bias[len(first) :]
            inner = np.asarray(
                gate(jnp.asarray(first, "f4"), jnp.asarray(second, "f4")).astype(jnp.bfloat16), np.float64
            )
            value = down[expert] @ inner
            out[token] += float(share) * (value if biases is None else value + down_bias)
    return out


# tokens, choices, experts, hidden, width
SHAPES = [(1, 4, 8, 96, 48 * 2), (2, 2, 8, 64, 32), (9, 3, 4, 320, 64), (20, 2, 2, 128, 32), (33, 4, 5, 64, 96)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_matches_float64(shape: tuple[int, ...]) -> None:
    check(shape, expert_ffn_ref, 0)


# Interpreting costs as much as is unrolled: more than 8 tokens take two tiles of rows and of columns.
@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[1], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES[2:])], ids=str
)
def test_kernels_match_float64(shape: tuple[int, ...]) -> None:
    check(shape, functools.partial(packed_expert_ffn, interpret=True), 0)


@pytest.mark.parametrize("option", [1, 2])
def test_other_gates_without_biases_factor_or_residual(option: int) -> None:
    check((5, 2, 4, 64, 32), expert_ffn_ref, option)
    if option == 1:
        check((1, 2, 4, 64, 32), functools.partial(packed_expert_ffn, interpret=True), option)


@pytest.mark.slow
def test_many_tokens_take_the_sorted_kernel() -> None:
    tokens = FEW_PAIRS // 2 + 3
    check((tokens, 2, 5, 96, 32), functools.partial(packed_expert_ffn, interpret=True), 0)


def check(shape: tuple[int, ...], function, option: int) -> None:
    tokens, choices, experts, hidden, width = shape
    rng = np.random.default_rng(shape)
    gate_up, plain_up = random_matrices(rng, experts, 2 * width, hidden, True)
    down, plain_down = random_matrices(rng, experts, hidden, width, False)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, choices)).astype(np.float32)
    if option == 0:
        ids.reshape(-1)[1::3] = -1
    biases = (rng.standard_normal((experts, 2 * width)), rng.standard_normal((experts, hidden)))
    options = {"gate": GATES[1 - option]}
    if option == 0:
        options |= {
            "biases": tuple(jnp.asarray(bias, jnp.bfloat16) for bias in biases),
            "factor": jnp.asarray(rng.random(tokens) + 0.5, jnp.float32),
            "residual": jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16),
        }
    gate = options.pop("gate")
    call = jax.jit(functools.partial(function, gate=gate))
    got = np.asarray(call(x, jnp.asarray(ids), jnp.asarray(weights), gate_up, down, **options), np.float64)
    held = {name: options.get(name) for name in ("biases", "factor", "residual")}
    want = expected(x, ids, weights, plain_up, plain_down, gate, *held.values())
    assert np.abs(got - want).max() <= 0.012 * np.abs(want).max()
    assert np.abs(got - want).mean() <= 0.004 * np.abs(want).mean() + 0.002 * np.abs(want).max()


@pytest.mark.parametrize("shape", [(2, 1, 7), (7, 3, 5), (64, 4, 32), (3, 4, 128)], ids=str)
def test_rows_are_sorted_by_expert_and_every_slot_is_told(shape: tuple[int, int, int]) -> None:
    tokens, choices, experts = shape
    rng = np.random.default_rng(shape)
    x = jnp.asarray(rng.standard_normal((tokens, 40)), jnp.bfloat16)
    ids = np.stack([rng.permutation(experts)[:choices] for _ in range(tokens)]).astype(np.int32)
    rows = jax.tree.map(np.asarray, sort_rows(x, jnp.asarray(ids), experts, interpret=True))
    flat = ids.reshape(-1)
    order = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(rows.place[order], np.arange(flat.size))
    np.testing.assert_array_equal(rows.x.astype("f4"), np.asarray(x, "f4")[order // choices])
    told = {}
    for expert, start, end in zip(rows.expert, rows.start, rows.end, strict=True):
        if end > start:
            told[int(expert)] = (int(start), int(end))
    sorted_ids = flat[order]
    assert told == {
        int(e): (int(np.searchsorted(sorted_ids, e)), int(np.searchsorted(sorted_ids, e, "right"))) for e in set(flat)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("row_tiles", "warps", "column_tiles"), [(2, 1, 2), (2, 2, 1), (1, 4, 3), (3, 1, 1)])
def test_any_tiles_give_the_same(row_tiles: int, warps: int, column_tiles: int) -> None:
    rng = np.random.default_rng(5)
    matrices, plain = random_matrices(rng, 3, 80, 640, False)
    x = jnp.asarray(rng.standard_normal((20, 640)), jnp.bfloat16)
    ids = np.stack([rng.permutation(3)[:2] for _ in range(20)]).astype(np.int32)
    rows = sort_rows(x, jnp.asarray(ids), 3, interpret=True)
    tiles = FragmentTiles(row_tiles, warps)
    out = packed_product(rows, matrices, tiles=tiles, column_tiles=column_tiles, interpret=True)
    got = np.asarray(out, np.float64)[np.asarray(rows.place)]
    want = np.stack([plain[e] @ np.asarray(x[i // 2], np.float64) for i, e in enumerate(ids.reshape(-1))])
    assert np.abs(got - want).max() <= 0.01 * np.abs(want).max()
