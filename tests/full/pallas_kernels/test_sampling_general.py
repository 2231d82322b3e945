"""The general sampling kernel against the reference: every row it is given, and no other."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from resin.pallas_kernels.draw import Draw, sample_tokens_ref
from resin.pallas_kernels.sampling_general import GENERAL, finish_tokens


def rows_of(count: int, seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    choose = lambda values: jnp.asarray(rng.choice(values, count))  # noqa: E731
    return Draw(
        temperature=choose(np.array([0.5, 1.0, 2.0], np.float32)),
        top_k=choose(np.array([0, 1, 150, 400], np.int32)),
        top_p=choose(np.array([0.3, 0.97, 1.0], np.float32)),
        min_p=choose(np.array([0.0, 0.01, 0.2], np.float32)),
        seed_low=choose(np.arange(1000, dtype=np.int32)),
        seed_high=choose(np.arange(1000, dtype=np.int32)),
        positions=choose(np.arange(1000, dtype=np.int32)),
    )


@pytest.mark.parametrize("vocab", [300, 4096, 5003])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_reference(vocab: int, ties: bool) -> None:
    draw = rows_of(4, vocab + ties)
    logits = np.random.default_rng(vocab).normal(size=(4, vocab)).astype(np.float32) * 2
    if ties:
        logits = np.round(logits)
    want = sample_tokens_ref(jnp.asarray(logits), draw)
    got = finish_tokens(jnp.full(4, GENERAL, jnp.int32), jnp.asarray(logits), draw, interpret=True)
    assert np.array_equal(got, want)


def test_leaves_finished_rows_alone() -> None:
    logits = jnp.zeros((4, 100), jnp.float32)
    tokens = jnp.asarray([7, GENERAL, -1, 99], jnp.int32)
    got = np.asarray(finish_tokens(tokens, logits, rows_of(4, 0), interpret=True))
    assert got[[0, 2, 3]].tolist() == [7, -1, 99] and 0 <= got[1] < 100
