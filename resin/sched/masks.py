"""Allowed-token masks: asks each constrained request which tokens may come next."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable

import numpy as np

from resin.plan import InvalidRequest
from resin.sched.request import Request


def allowed_masks(
    rows: Iterable[tuple[int, Request]],
    padded_rows: int,
    vocab_size: int,
    failures: deque[tuple[Request, Exception]],
) -> np.ndarray | None:
    """Bit sets of the allowed tokens, None if no row is constrained.

    Args:
        rows: the plan's rows that emit, with their places; at least all constrained ones.
        padded_rows: rows of the result.
        vocab_size: tokens.
        failures: receives the requests whose callback raised or returned nonsense; their row allows everything.

    Returns:
        int32 [padded_rows, ceil(vocab_size / 32)], bit t % 32 of word t // 32 set if token t is allowed. Rows that
        are not constrained hold zeros.
    """
    constrained = [(i, row) for i, row in rows if row.params.allowed_tokens is not None]
    if not constrained:
        return None
    words = -(-vocab_size // 32)
    # Fresh memory of the system is zero, and costs nothing where it is not written: one row of many has a mask, mostly.
    masks = np.frombuffer(mmap.mmap(-1, 4 * padded_rows * words), np.int32).reshape(padded_rows, words)
    for i, request in constrained:
        assert request.params.allowed_tokens is not None
        try:
            allowed = request.params.allowed_tokens(request.output_ids)
            masks[i] = -1 if allowed is None else _pack(allowed, vocab_size, words)
        except Exception as error:  # a user's callback may raise anything; only its own request must end
            failures.append((request, error))
            masks[i] = -1
    masks.flags.writeable = False
    return masks


def _pack(allowed: np.ndarray, vocab_size: int, words: int) -> np.ndarray:
    """int32 [words] from bool [vocab] or a ready bit set of [words] int32."""
    array = np.asarray(allowed)
    if array.dtype == np.int32 and array.shape == (words,):
        last = int(array[-1]) & ((1 << (vocab_size - 1) % 32 + 1) - 1)
        _check_some_token(bool(last) or bool(array[:-1].any()))
        return array
    if array.dtype != np.bool_ or array.shape != (vocab_size,):
        raise InvalidRequest("allowed_tokens", (array.dtype, array.shape), f"bool [{vocab_size}] or int32 [{words}]")
    _check_some_token(bool(array.any()))
    padded = np.zeros(words * 32, np.bool_)
    padded[:vocab_size] = array
    return np.packbits(padded, bitorder="little").view(np.int32)


def _check_some_token(some: bool) -> None:
    if not some:
        raise InvalidRequest("allowed_tokens", "no token", "at least one allowed token")
