"""Checks of `shift_state`, each with inputs of its own; on a GPU, interpreted, or of the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np

from resin.pallas_kernels.shift_state import shift_state, shift_state_ref
from tests.pallas_kernels.grid import fresh_seed, poison_memory


def check_shift_state(
    dtype: str,
    arena_dtype: str,
    taps: int,
    lengths: Sequence[int],
    *,
    width: int = 64,
    rows_per_page: int = 8,
    first_row: int = 1,
    in_place: np.ndarray | None = None,
    pages: int = 40,
    copies: int = 1,
    interpret: bool | None = False,
) -> None:
    """Against states and chunks joined in NumPy; what no sequence owns stays as it was.

    A page comes before the first real one of every state, every other sequence starts here, every third stays in its
    pages unless `in_place` says which do, and sequences without tokens are padding, whose pages are 0.

    Args:
        copies: with several, copy j of a state is what it is after the chunk's first j + 1 tokens.
        interpret: None checks the reference instead of the kernel.
    """
    seed = fresh_seed()
    rng, count = np.random.default_rng(seed), len(lengths)
    pages_per_state = -(-(first_row + taps) // rows_per_page)
    real = np.array(lengths) > 0
    is_fresh = np.arange(count) % 2 == 1
    in_place = np.arange(count) % 3 == 0 if in_place is None else in_place
    states = rng.permutation(np.arange(pages // 2, pages))[: (1 + copies) * count * pages_per_state].astype(np.int32)
    source, *targets = states.reshape(1 + copies, count, pages_per_state)
    targets[0] = np.where(in_place[:, None], source, targets[0])
    source, *targets = (np.where(real[:, None], each, 0) for each in (source, *targets))
    target = np.stack(targets, axis=1)  # [B, copies, pages_per_state]
    arena = rng.standard_normal((pages, rows_per_page * width)).astype(ml_dtypes.bfloat16)
    arena = arena.view(np.uint16) if arena_dtype == "uint16" else arena.astype(arena_dtype)
    x = rng.standard_normal((sum(lengths) + 3, width)).astype(ml_dtypes.bfloat16).astype(dtype)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    function = shift_state_ref if interpret is None else functools.partial(shift_state, interpret=interpret)
    poison_memory()
    held, left = jax.jit(functools.partial(function, taps=taps, copies=copies))(
        x, arena, source.reshape(-1), target.reshape(-1), indptr, is_fresh, first_row
    )
    expected = np.array(arena).reshape(pages, rows_per_page, width)
    rows = first_row + np.arange(taps)
    for sequence in np.flatnonzero(real):
        before = arena.reshape(expected.shape)[source[sequence][rows // rows_per_page], rows % rows_per_page]
        before = before.view(ml_dtypes.bfloat16) if arena_dtype == "uint16" else before
        before = np.zeros_like(before, dtype) if is_fresh[sequence] else before.astype(dtype)
        np.testing.assert_array_equal(np.asarray(held)[sequence], before, f"seed {seed}")
        start, end = indptr[sequence : sequence + 2]
        for copy in range(copies):
            history = np.concatenate([before, x[start : end if copies == 1 else start + copy + 1]])[-taps:]
            history = history.view(np.uint16) if arena_dtype == "uint16" else history.astype(arena_dtype)
            expected[target[sequence, copy][rows // rows_per_page], rows % rows_per_page] = history
    left = np.asarray(left).reshape(expected.shape)
    np.testing.assert_array_equal(left[1:], expected[1:], f"seed {seed}")  # page 0 is scratch
    if interpret is not None:
        np.testing.assert_array_equal(left[0], expected[0], f"seed {seed}")
