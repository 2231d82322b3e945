"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from resin.recipes.tagged import possible_start_length


class StopMatcher:
    """Passes text on until the first stop string is complete, and never shows part of it.

    Of several stop strings the one that is complete first wins; if two end at the same place, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now; look at `matched` afterwards. Later text is dropped once it is set."""
        if self.matched is not None or not self._stops:
            return "" if self._stops else text
        self._held += text
        ends = ((at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            _, start, self.matched = first
            shown, self._held = self._held[:start], ""
            return shown
        keep = possible_start_length(self._held, self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back in case it became a stop string."""
        held, self._held = self._held, ""
        return held
