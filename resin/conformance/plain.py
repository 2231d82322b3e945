"""The plain forward: jitted functions of whole sequences without a cache, as a trainer computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from resin.models.forward import dense_pass
from resin.models.weights import AbstractModel
from resin.plan import CacheGroup
from resin.plan.cache import fp8_scales

# Rows whose logits are made at once: 64 rows of a 262k vocabulary are 67 MB.
BLOCK_TOKENS = 64
TOP = 20


class Score(NamedTuple):
    """Logprobs along a sequence of T tokens.

    Attributes:
        following: float32 [T - 1], of the token that follows each.
        top: float32 [T - 1, 20], the largest at each place.
        deviation: standard deviation of all logits.
    """

    following: np.ndarray
    top: np.ndarray
    deviation: float


def score_logits(logits: np.ndarray, token_ids: np.ndarray) -> Score:
    """Logprobs of `token_ids` [T] under their `[T, vocab]` logits."""
    logits, following = np.asarray(logits, np.float32)[:-1], np.asarray(token_ids)[1:]
    largest = logits.max(axis=-1, keepdims=True)
    total = (largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=-1, dtype=np.float64))).astype(np.float32)
    top = -np.sort(np.partition(-logits, TOP - 1, axis=-1)[:, :TOP], axis=-1)
    return Score(logits[np.arange(len(following)), following] - total, top - total[:, None], float(logits.std()))


class PlainForward:
    """`jax.jit` of a model's forward.

    Args:
        model: structure.
        weights: in the order of its declarations.
        groups: cache groups, of which those in 8 bits round keys and values.
        context: longest sequence; shorter ones are padded to it, so that one program serves all.
    """

    def __init__(
        self, model: AbstractModel, weights: tuple[jax.Array, ...], groups: Sequence[CacheGroup], context: int
    ) -> None:
        self._context = -(-context // BLOCK_TOKENS) * BLOCK_TOKENS
        self._weights = weights
        scales = fp8_scales(groups)

        @jax.jit
        def hidden(weights: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array:
            return model.merge(weights)(dense_pass(token_ids, fp8_scales=scales, context_tokens=context))

        @jax.jit
        def head(weights: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
            return model.merge(weights).logits(dense_pass(jnp.zeros(rows.shape[0], jnp.int32)), rows)

        self._hidden, self._head = hidden, head

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [T, vocab]."""
        count = len(token_ids)
        # Causal models never see what comes after.
        padded = np.pad(np.asarray(token_ids, np.int32), (0, self._context - count))
        with jax.default_matmul_precision("highest"):
            hidden = self._hidden(self._weights, jnp.asarray(padded))
            blocks = [
                np.asarray(self._head(self._weights, hidden[start : start + BLOCK_TOKENS]))
                for start in range(0, count, BLOCK_TOKENS)
            ]
        return np.concatenate(blocks)[:count]

    def score(self, token_ids: np.ndarray) -> Score:
        """Logprobs along a sequence."""
        return score_logits(self.logits(token_ids), token_ids)
