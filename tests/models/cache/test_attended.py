"""One softmax over several sets of keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.cache.attended import Attended, merge
from resin.models.cache.dense import DenseCache
from resin.models.cache.protocol import Attend, PlaneRef

TOKENS, HEADS, WIDTH, KEYS = 3, 4, 8, 11


def attend(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 attention with scores [T, H, K] to values [H, K, D]; -inf masks a score."""
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(axis=-1))
    weights = np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None])
    return np.einsum("thk,hkd->thd", weights, values), lse


def part(scores: np.ndarray, values: np.ndarray) -> Attended:
    return Attended(*(jnp.asarray(each, jnp.float32) for each in attend(scores, values)))


@pytest.mark.parametrize("cuts", [(), (4,), (1, 1, 7), (0, 5)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_parts_make_one_softmax(cuts: tuple[int, ...], has_sinks: bool) -> None:
    rng = np.random.default_rng(len(cuts))
    scores, values = 4 * rng.standard_normal((TOKENS, HEADS, KEYS)), rng.standard_normal((HEADS, KEYS, WIDTH))
    sinks = rng.standard_normal(HEADS) if has_sinks else None
    scores[0, :, :6] = -np.inf  # one query sees nothing of the first sets
    pieces = zip(np.split(scores, cuts, axis=2), np.split(values, cuts, axis=1), strict=True)
    merged = merge([part(*piece) for piece in pieces], None if sinks is None else jnp.asarray(sinks, jnp.float32))
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[None, :, None], (TOKENS, HEADS, 1))], axis=2)
        values = np.concatenate([values, np.zeros((HEADS, 1, WIDTH))], axis=1)
    out, lse = attend(scores, values)
    np.testing.assert_allclose(merged.out, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged.lse, lse, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_no_key_at_all_gets_zeros() -> None:
    nothing = Attended(jnp.zeros((1, 2, WIDTH)), jnp.full((1, 2), -jnp.inf))
    merged = merge([nothing, nothing])
    assert not np.any(merged.out) and np.isneginf(merged.lse).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sinks_within_attention_are_sinks_at_the_merge(window: int | None, softcap: float | None) -> None:
    rng = np.random.default_rng(0)
    positions, how = jnp.arange(KEYS, dtype=jnp.int32), Attend(0.3, window, softcap)
    entries = PlaneRef("history", "kv", 4, 4, WIDTH)
    cache = DenseCache(positions, {})
    cache.append(entries, jnp.asarray(rng.standard_normal((KEYS, 4, WIDTH)), jnp.float32))
    query = jnp.asarray(rng.standard_normal((KEYS, HEADS, WIDTH)), jnp.float32)
    sinks = jnp.asarray(rng.standard_normal(HEADS), jnp.float32)
    inside = cache.attend(query, *entries.halves(), how, sinks=sinks, with_lse=True)
    after = merge([cache.attend(query, *entries.halves(), how, with_lse=True)], sinks)
    for one, other in zip(inside, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
