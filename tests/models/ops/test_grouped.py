from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.ops.grouped import MAX_TILE_ROWS, grouped_experts, tile_rows

HIDDEN = 8


def run(x: np.ndarray, experts: np.ndarray, weights: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    held = jnp.asarray(matrices)
    with jax.default_matmul_precision("highest"):
        out = jax.jit(lambda *args: grouped_experts(*args, len(matrices), lambda e, rows: rows @ held[e]))(
            jnp.asarray(x), jnp.asarray(experts), jnp.asarray(weights)
        )
    return np.asarray(out)


@pytest.mark.parametrize(("tokens", "choices", "count"), [(1, 2, 8), (5, 3, 4), (33, 2, 3), (64, 1, 1), (7, 4, 128)])
def test_equals_a_loop_over_tokens(tokens: int, choices: int, count: int) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, HIDDEN), np.float32)
    experts = np.stack([rng.permutation(max(count, choices))[:choices] for _ in range(tokens)]).astype(np.int32)
    weights = rng.random((tokens, choices), np.float32)
    matrices = rng.standard_normal((count, HIDDEN, HIDDEN), np.float32)
    expected = np.zeros_like(x)
    for token in range(tokens):
        for expert, weight in zip(experts[token], weights[token], strict=True):
            if expert < count:
                expected[token] += weight * (x[token] @ matrices[expert])
    np.testing.assert_allclose(run(x, experts, weights, matrices), expected, atol=1e-5)


def test_ids_outside_contribute_nothing_even_for_rows_that_are_not_numbers() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, HIDDEN), np.float32)
    x[3] = np.nan
    matrices = rng.standard_normal((2, HIDDEN, HIDDEN), np.float32)
    experts = np.array([[0, -1], [5, 1], [-1, -1], [-1, -1]], np.int32)
    out = run(x, experts, np.ones((4, 2), np.float32), matrices)
    np.testing.assert_allclose(out[:2], [x[0] @ matrices[0], x[1] @ matrices[1]], atol=1e-5)
    np.testing.assert_array_equal(out[2:], 0.0)


def test_no_expert_is_read_that_nobody_chose() -> None:
    matrices = np.full((4, HIDDEN, HIDDEN), np.nan, np.float32)
    matrices[2] = np.eye(HIDDEN)
    x = np.ones((6, HIDDEN), np.float32)
    np.testing.assert_array_equal(run(x, np.full((6, 1), 2, np.int32), np.ones((6, 1), np.float32), matrices), x)


def test_tiles_are_about_twice_the_mean_share() -> None:
    assert [tile_rows(pairs, 32) for pairs in (1, 4, 32, 64, 256, 2048, 10**6)] == [1, 1, 2, 4, 16, 64, MAX_TILE_ROWS]
