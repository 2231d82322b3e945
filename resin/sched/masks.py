"""Allowed-token masks: asks each constrained request which tokens may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from resin.plan import InvalidRequest
from resin.sched.request import Request


def allowed_masks(
    requests: Iterable[Request],
    vocab_size: int,
    failures: deque[tuple[Request, Exception]],
) -> np.ndarray | None:
    """Bit sets of the allowed tokens, None if no request is constrained.

    Args:
        requests: of the plan's rows that emit, in their order; at least all constrained ones.
        vocab_size: tokens.
        failures: receives the requests whose callback raised or returned nonsense; their row allows everything.

    Returns:
        int32 [m, ceil(vocab_size / 32)] of the m constrained requests, bit t % 32 of word t // 32 set if token t is
        allowed.
    """
    constrained = [request for request in requests if request.params.allowed_tokens is not None]
    if not constrained:
        return None
    words = -(-vocab_size // 32)
    masks = np.empty((len(constrained), words), np.int32)
    for mask, request in zip(masks, constrained, strict=True):
        assert request.params.allowed_tokens is not None
        try:
            allowed = request.params.allowed_tokens(request.output_ids)
            mask[:] = -1 if allowed is None else _pack(allowed, vocab_size, words)
        except Exception as error:  # a user's callback may raise anything; only its own request must end
            failures.append((request, error))
            mask[:] = -1
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
