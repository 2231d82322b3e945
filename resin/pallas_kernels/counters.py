"""Zeros that kernels' programs count in and leave as zeros: one array serves all layers of a pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp


class Counters:
    """Hands the array that one call gives back to the next."""

    def __init__(self) -> None:
        self._held: jax.Array | None = None

    def take(self, least: int) -> jax.Array:
        """int32 zeros, `least` of them or more."""
        held = self._held
        return held if held is not None and held.shape[0] >= least else jnp.zeros((least,), jnp.int32)

    def give_back(self, counters: jax.Array | None) -> None:
        """Keeps what a kernel has left of them."""
        self._held = counters
