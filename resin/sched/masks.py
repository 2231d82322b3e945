"""Allowed-token masks: asks each constrained request which tokens may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from resin.plan import InvalidRequest
from resin.sched.request import Request


def allowed_masks(
    rows: Sequence[Request | None],
    padded_rows: int,
    vocab_size: int,
    failures: deque[tuple[Request, Exception]],
) -> np.ndarray | None:
    """Bit sets of the allowed tokens, None if no row is constrained.

    Args:
        rows: the plan's rows; None for those that are not constrained or emit nothing.
        padded_rows: rows of the result.
        vocab_size: tokens.
        failures: receives the requests whose callback raised or returned nonsense; their row allows everything.

    Returns:
        int32 [padded_rows, ceil(vocab_size / 32)], bit t % 32 of word t // 32 set if token t is allowed.
    """
    constrained = [(i, row) for i, row in enumerate(rows) if row is not None and row.params.allowed_tokens is not None]
    if not constrained:
        return None
    words = -(-vocab_size // 32)
    masks = np.full((padded_rows, words), -1, np.int32)
    for i, request in constrained:
        assert request.params.allowed_tokens is not None
        try:
            allowed = request.params.allowed_tokens(request.output_ids)
            if allowed is not None:
                masks[i] = _pack(allowed, vocab_size, words)
        except Exception as error:  # a user's callback may raise anything; only its own request must end
            failures.append((request, error))
    masks.flags.writeable = False
    return masks


def _pack(allowed: np.ndarray, vocab_size: int, words: int) -> np.ndarray:
    """int32 [words] from bool [vocab] or a ready bit set of [words] int32."""
    array = np.asarray(allowed)
    if array.dtype == np.int32 and array.shape == (words,):
        inside = np.full(words, -1, np.int32)
        if vocab_size % 32:
            inside[-1] = (1 << vocab_size % 32) - 1
        _check_some_token((array & inside).any())
        return array
    if array.dtype != np.bool_ or array.shape != (vocab_size,):
        raise InvalidRequest("allowed_tokens", (array.dtype, array.shape), f"bool [{vocab_size}] or int32 [{words}]")
    _check_some_token(array.any())
    padded = np.zeros(words * 32, np.bool_)
    padded[:vocab_size] = array
    return np.packbits(padded, bitorder="little").view(np.int32)


def _check_some_token(some: np.bool_) -> None:
    if not some:
        raise InvalidRequest("allowed_tokens", "no token", "at least one allowed token")
