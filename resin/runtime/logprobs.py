"""Log probabilities of chosen and of the most likely tokens. N rows, V tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from resin.plan.sampling import MAX_TOP_LOGPROBS

SPAN_TOKENS = 128


class Logprobs(NamedTuple):
    """float32 [N], int32 [N, 20], float32 [N, 20]: the chosen token's and the most likely ones', best first."""

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """Natural log probabilities under `[N, V]` float32 logits of `tokens` [N] and of the 20 most likely."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    top, top_ids = top_tokens(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    short = MAX_TOP_LOGPROBS - top.shape[1]
    top, top_ids = jnp.pad(top, ((0, 0), (0, short)), constant_values=-jnp.inf), jnp.pad(top_ids, ((0, 0), (0, short)))
    return Logprobs(chosen - total, top_ids, top - total[:, None])


def top_tokens(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of `[N, V]` logits, best first, equal ones by token id: float32 and int32 [N, count].

    A sort of the whole vocabulary would take most of a step's sampling. The tokens lie in the `count` spans that have
    the largest maxima, equal ones from the lowest: every one of these has a token that comes before all of another's.
    """
    vocab = logits.shape[1]
    spans = -(-vocab // SPAN_TOKENS)
    if spans <= count:
        top, ids = lax.top_k(logits, count)
        return top, ids.astype(jnp.int32)
    tokens = jnp.arange(SPAN_TOKENS, dtype=jnp.int32)
    padded = jnp.pad(logits, ((0, 0), (0, spans * SPAN_TOKENS - vocab)), constant_values=-jnp.inf)
    _, chosen = lax.top_k(padded.reshape(-1, spans, SPAN_TOKENS).max(axis=2), count)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=1)  # so that ids rise with places among the chosen
    ids = (chosen[:, :, None] * SPAN_TOKENS + tokens[None, None, :]).reshape(len(logits), -1)
    top, places = lax.top_k(jnp.take_along_axis(padded, ids, axis=1), count)
    return top, jnp.take_along_axis(ids, places, axis=1)


def no_logprobs(rows: int) -> Logprobs:
    """What rows without requested logprobs have in their place."""
    shape = (rows, MAX_TOP_LOGPROBS)
    return Logprobs(jnp.zeros(rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
