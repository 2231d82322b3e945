"""The layout of MXFP4 matrices: every code and scale comes back from its place, on the host and in kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from resin.models.loading.formats.mxfp4 import dequantise_mxfp4
from resin.pallas_kernels.mxfp4 import (
    PackedMatrices,
    decode_register,
    multiply_fragments,
    pack_factors,
    pack_words,
    packed_shapes,
    scale_shift,
    scaled_pair,
    unpack_matrices,
)


def packed(blocks: np.ndarray, scales: np.ndarray) -> PackedMatrices:
    unit = jnp.float32(2.0 ** scale_shift(scales))
    return PackedMatrices(jnp.asarray(pack_words(blocks)), jnp.asarray(pack_factors(scales)), unit)


def random_parts(rng: np.random.Generator, rows: int, inner: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.integers(0, 256, (rows, inner // 32, 16)).astype(np.uint8)
    return blocks, rng.integers(low, high, (rows, inner // 32)).astype(np.uint8)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 `[rows, K]`."""
    return dequantise_mxfp4(blocks[None], scales[None])[0].astype(np.float64).T


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_byte_and_scale_comes_back(dtype: str) -> None:
    # Each row has all 256 bytes; one scale a row, in two matrices, as one factor cannot span them all.
    blocks = np.tile(np.arange(256, dtype=np.uint8), (128, 1)).reshape(128, 16, 16)
    for first in (1, 125):
        scales = np.repeat(np.arange(first, first + 128, dtype=np.uint8)[:, None], 16, axis=1)
        got = np.asarray(unpack_matrices(packed(blocks, scales), 512, jnp.dtype(dtype)), np.float64)
        expected = decoded(blocks, scales)
        normal = np.abs(expected) >= np.finfo(np.float32).tiny  # devices may flush what is smaller
        np.testing.assert_array_equal(got[normal], expected[normal])
        assert normal.mean() > 0.85


@pytest.mark.parametrize(("rows", "inner"), [(16, 32), (48, 96), (32, 320), (16, 2880)])
def test_any_shape_comes_back_and_has_the_declared_size(rows: int, inner: int) -> None:
    blocks, scales = random_parts(np.random.default_rng(0), rows, inner, 110, 128)
    matrix = packed(blocks, scales)
    assert (matrix.words.shape, matrix.factors.shape) == tuple(s[1:] for s in packed_shapes(1, rows, inner)[:2])
    got = np.asarray(unpack_matrices(matrix, inner, jnp.dtype("float32")))
    np.testing.assert_array_equal(got, decoded(blocks, scales))


def test_leading_axes_are_matrices_of_their_own() -> None:
    rng = np.random.default_rng(1)
    parts = [random_parts(rng, 32, 96, 100 + 20 * i, 120 + 20 * i) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(packed(*part) for part in parts))
    got = np.asarray(unpack_matrices(stacked, 96, jnp.dtype("float32")))
    np.testing.assert_array_equal(got, np.stack([decoded(*part) for part in parts]))


@pytest.mark.parametrize("shift", [0, 60])
def test_fragments_in_a_kernel_are_the_matrix(shift: int) -> None:
    """One tile of 16 rows times 8 tokens, group by group, as a warp multiplies it."""
    rng = np.random.default_rng(2)
    blocks, scales = random_parts(rng, 16, 256, 118 + shift, 126 + shift)
    x = rng.standard_normal((8, 256)).astype(ml_dtypes.bfloat16)
    pairs = x.view(np.int32).reshape(8, 4, 2, 4, 4)  # token, group, half, j, s
    words, factors, unit = (np.asarray(part) for part in packed(blocks, scales))
    of_lanes = jnp.asarray(np.repeat(factors[0].reshape(8, 1, 4), 4, axis=1).reshape(-1))
    sums = jnp.zeros(128, jnp.float32)
    for group in range(4):
        registers = [
            decode_register(jnp.asarray(words[0, group]), of_lanes, group, r, interpret=True) for r in range(4)
        ]
        halves = [jnp.asarray(pairs[:, group, half].reshape(-1)) for half in range(2)]
        sums = multiply_fragments(sums, registers, *halves, interpret=True)
    out = np.asarray(sums, np.float64).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8) * unit
    expected = decoded(blocks, scales) @ x.astype(np.float64).T
    np.testing.assert_allclose(out, expected, atol=1e-6 * np.abs(expected).max())


def test_a_register_holds_pairs_of_its_rows_and_half() -> None:
    blocks, scales = random_parts(np.random.default_rng(3), 16, 64, 120, 128)
    words, factors, _ = (np.asarray(part) for part in packed(blocks, scales))
    matrix = decoded(blocks, scales).reshape(2, 8, 2, 4, 4, 2)  # row half, g, half, j, s, q
    for register in range(4):
        byte = (factors[0, 0].reshape(8, 4)[:, 0] >> (8 * register)) & 0xFF
        lanes = words[0, 0].reshape(8, 16)
        spread = jnp.asarray(np.repeat(byte[:, None], 16, axis=1))
        pair = scaled_pair(jnp.asarray(lanes), spread, register, interpret=True)
        got = np.stack([np.asarray(value, np.float64) for value in pair], axis=-1).reshape(8, 4, 4, 2)
        np.testing.assert_array_equal(got, matrix[register % 2, :, register // 2])
