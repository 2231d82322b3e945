"""The cache of one whole sequence against float64 attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.cache.dense import DenseCache
from resin.models.cache.protocol import Attend, PlaneRef
from resin.plan import InvalidRequest

TOKENS, KV_HEADS, HEADS, WIDTH = 9, 2, 4, 8
ENTRIES = PlaneRef.of_layer("history", "kv", 3, 2 * KV_HEADS, WIDTH)


def filled(seed: int = 0) -> tuple[DenseCache, np.ndarray, np.ndarray]:
    """A cache of one layer's entries, a query, and the entries."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((TOKENS, ENTRIES.rows, WIDTH)).astype(np.float32)
    cache = DenseCache(jnp.arange(TOKENS, dtype=jnp.int32), {})
    cache.append(ENTRIES, jnp.asarray(vectors))
    return cache, rng.standard_normal((TOKENS, HEADS, WIDTH)).astype(np.float32), vectors


def expected(query: np.ndarray, vectors: np.ndarray, how: Attend) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in np.split(vectors.astype(np.float64), 2, 1))
    scores = np.einsum("thd,shd->ths", query.astype(np.float64), keys) * how.scale
    if how.softcap is not None:
        scores = how.softcap * np.tanh(scores / how.softcap)
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)[None, :]
    seen = (distance >= 0) & (distance < (how.window or TOKENS))
    weights = np.where(seen[:, None, :], np.exp(scores), 0)
    total = weights.sum(axis=-1)
    return np.einsum("ths,shd->thd", weights / total[..., None], values), np.log(total)


@pytest.mark.parametrize("how", [Attend(0.3), Attend(0.5, window=3), Attend(0.3, softcap=1.5)], ids=str)
def test_attention_and_its_denominator(how: Attend) -> None:
    cache, query, vectors = filled()
    attended = cache.attend(jnp.asarray(query), *ENTRIES.halves(), how)
    for got, wanted in zip(attended, expected(query, vectors, how), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_layers_that_name_the_same_rows_share_them() -> None:
    cache, query, vectors = filled()
    again = PlaneRef.of_layer("history", "kv", 3, 2 * KV_HEADS, WIDTH)
    out = cache.attend(jnp.asarray(query[:, ::-1]), *again.halves(), Attend(0.3)).out
    np.testing.assert_allclose(out, expected(query[:, ::-1], vectors, Attend(0.3))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", [0, 11, 13])
def test_rows_that_no_layer_has_left_are_refused(row: int) -> None:
    cache, query, _ = filled()
    with pytest.raises(InvalidRequest, match="rows that a layer has appended before"):
        cache.attend(jnp.asarray(query), *PlaneRef("history", "kv", row, 4, WIDTH).halves(), Attend(0.3))


def test_a_state_starts_as_zeros_and_is_what_was_left() -> None:
    cache, state = filled()[0], PlaneRef("state", "sum", 2, 3, 4)
    np.testing.assert_array_equal(cache.read_state(state, jnp.float32), np.zeros((1, 3, 4)))
    cache.write_state(state, jnp.ones((1, 3, 4), jnp.float32))
    np.testing.assert_array_equal(cache.read_state(state, jnp.bfloat16), np.ones((1, 3, 4)))
