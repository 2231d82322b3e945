"""The tokens of one forward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """T tokens, padding included; those of a sequence lie side by side and in order.

    Attributes:
        ids: int32 [T].
        positions: int32 [T], place in the sequence; 0 for padding.
        row: int32 [T], the sequence; any for padding.
        live: bool [T], False for padding.
    """

    ids: jax.Array
    positions: jax.Array
    row: jax.Array
    live: jax.Array

    @staticmethod
    def whole_sequence(ids: jax.Array) -> Tokens:
        """One sequence [T] from its start."""
        places = jnp.arange(ids.shape[0], dtype=jnp.int32)
        return Tokens(ids, places, jnp.zeros_like(places), jnp.ones(ids.shape, jnp.bool_))
