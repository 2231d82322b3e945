"""Log probabilities of a row against NumPy in float64, ties and odd vocabularies included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.plan.sampling import MAX_TOP_LOGPROBS
from resin.runtime.logprobs import SPAN_TOKENS, token_logprobs, top_tokens

top_jit = jax.jit(top_tokens, static_argnums=1)
WIDE = SPAN_TOKENS * (MAX_TOP_LOGPROBS + 3)


@pytest.mark.parametrize("vocab", [5, 203, WIDE - 1, WIDE, WIDE + 1])
def test_chosen_and_most_likely(vocab: int) -> None:
    logits = (3 * np.random.default_rng(vocab).standard_normal((6, vocab))).astype(np.float32)
    out = token_logprobs(jnp.asarray(logits), jnp.arange(6, dtype=jnp.int32) % vocab)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(out.chosen, expected[np.arange(6), np.arange(6) % vocab], atol=1e-5)
    shown = min(vocab, MAX_TOP_LOGPROBS)
    assert out.top.shape == out.top_ids.shape == (6, MAX_TOP_LOGPROBS)
    np.testing.assert_array_equal(out.top_ids[:, :shown], np.argsort(-logits, kind="stable")[:, :shown])
    np.testing.assert_allclose(out.top[:, :shown], -np.sort(-expected)[:, :shown], atol=1e-5)
    assert np.isneginf(out.top[:, shown:]).all()


@pytest.mark.parametrize("levels", [1, 2, 30])
def test_equal_logits_rank_by_id(levels: int) -> None:
    """Many equal ones, within a span and across spans, in the first span and in the last."""
    rng = np.random.default_rng(levels)
    logits = rng.integers(0, levels, (8, WIDE + 5)).astype(np.float32)
    logits[4:, : WIDE - 40] -= 9
    logits[6:, ::2] = -np.inf
    logits[7, 3:] = -np.inf
    top, ids = top_jit(jnp.asarray(logits), MAX_TOP_LOGPROBS)
    want = np.argsort(-logits, kind="stable", axis=1)[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(top, np.take_along_axis(logits, want, axis=1))
