from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.cache.shift import shift_chunks


@pytest.mark.parametrize(
    ("taps", "lengths"), [(2, (1,)), (1, (3, 1, 7)), (6, (3, 1, 7)), (2, (2, 0, 5, 0)), (2, (1,) * 4)]
)
def test_equals_joining_state_and_chunk(taps: int, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(taps)
    padding = 3
    held = rng.standard_normal((len(lengths), taps, 4), np.float32)
    x = rng.standard_normal((sum(lengths) + padding, 4), np.float32)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    before = jax.jit(shift_chunks)(jnp.asarray(held), jnp.asarray(x), jnp.asarray(indptr))
    assert len(before) == taps
    for sequence, count in enumerate(lengths):
        chunk = x[indptr[sequence] : indptr[sequence + 1]]
        history = np.concatenate([held[sequence], chunk])
        for age in range(taps):
            got = np.asarray(before[age])[indptr[sequence] : indptr[sequence + 1]]
            np.testing.assert_array_equal(got, history[age : age + count])
