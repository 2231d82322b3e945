"""Device memory that a bound runner keeps between steps, and what is on its way from there to the host."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resin.runtime.slots import SlotTable

# Far more than an engine keeps in flight. Results that nobody reads are forgotten after as many more.
_MAX_UNREAD = 64


class DeviceState:
    """Arena, slot table and a block of masks in place of those that a plan lacks, None while the runner is not bound,
    and results not read yet.

    The threads of XLA that copy results to the host need the interpreter to hand them over (jax 0.11.2). One that finds
    the interpreter ending takes the process down with it, so `settle` comes first.

    Args:
        is_host: whether the device's memory is the host's, where results need no copy.
    """

    def __init__(self, *, is_host: bool) -> None:
        self.arena: jax.Array | None = None
        self.slots: SlotTable | None = None
        self.no_masks: jax.Array | None = None
        self._is_host = is_host
        self._unread: deque[Sequence[jax.Array]] = deque(maxlen=_MAX_UNREAD)

    def send(self, results: Sequence[jax.Array]) -> None:
        """Starts a step's results on their way to the host."""
        self._unread.append(results)
        if not self._is_host:
            for result in results:
                result.copy_to_host_async()

    def forget(self, results: Sequence[jax.Array]) -> None:
        """Results that have been read."""
        kept = [other for other in self._unread if other is not results]
        self._unread = deque(kept, _MAX_UNREAD)

    def settle(self) -> None:
        """Waits until no program runs and no result is on its way. What fails has failed for whoever reads it."""
        while self._unread:
            for result in self._unread.popleft():
                with contextlib.suppress(Exception):
                    np.asarray(result)
        with contextlib.suppress(Exception):
            jax.block_until_ready((self.arena, self.slots))

    def abandon(self) -> None:
        """Lets go of everything without a wait: what runs will never end."""
        self._unread.clear()
        self.arena = self.slots = self.no_masks = None

    def release(self) -> None:
        """Gives the memory back once nothing uses it."""
        self.settle()
        self.arena = self.slots = self.no_masks = None


def place(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """An array that every process has, on the devices of all."""
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def allocate(abstract: Any) -> Any:
    """Zeros of the abstract shapes, made on their devices with their shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=shardings
    )()
