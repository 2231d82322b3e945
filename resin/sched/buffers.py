"""Memory of plan buffers, used again once nobody looks at a plan any more."""

from __future__ import annotations

import sys

import numpy as np

_KEPT = 8  # buffers of a size; more are alive only where plans are kept
_PROBE = [object()]
_IDLE = sys.getrefcount(_PROBE[0])  # of an object that a list alone holds


class BufferPool:
    """Hands out int32 buffers. Fresh memory, some hundred kB a plan, would cost more in page faults than its content.

    A plan, its columns and a runner that still copies from them hold views, and a view keeps its memory alive: what
    has one is never handed out again.
    """

    def __init__(self) -> None:
        self._owned: dict[int, list[np.ndarray]] = {}  # by size

    def take(self, words: int) -> np.ndarray:
        """int32 [words] with any content."""
        owned = self._owned.setdefault(words, [])
        for index in range(len(owned)):
            if sys.getrefcount(owned[index]) == _IDLE:
                return owned[index][:]
        memory = np.empty(words, np.int32)
        if len(owned) < _KEPT:
            owned.append(memory)
        return memory[:]
