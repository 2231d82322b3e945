"""An engine's hold on its runner: what it offers, and the arena that is bound to it meanwhile."""

from __future__ import annotations

from typing import Any

from resin.plan import ArenaSpec, InvalidRequest, OverlapRunner
from resin.plan.runner import RunnerParts
from resin.sched.cache import CacheManager


class Binding:
    """A runner as its engine sees it.

    Attributes:
        runner: the runner.
        parts: what it offers beside `forward`.
        can_overlap: whether it has `dispatch` and `collect`.

    Raises:
        InvalidRequest: no runner.
    """

    def __init__(self, runner: Any) -> None:
        self.runner: Any = runner
        self.parts = RunnerParts.of(runner)
        self.can_overlap = isinstance(runner, OverlapRunner)
        self._is_bound = False

    def bind(self, cache_pages: int | None, context_length: int, *, prefix_cache: bool) -> ArenaSpec:
        """Sizes the arena and binds the runner to it.

        Args:
            cache_pages: None takes what all slots would lease, of what the runner has, or all that for a prefix cache.
            context_length: of each slot.
            prefix_cache: whether pages are kept for later requests.

        Raises:
            InvalidRequest: too few pages, or the runner refuses.
        """
        config, free_pages = self.parts.config, self.parts.free_pages
        if not config.groups:
            return ArenaSpec(0, 0, config.arena_dtype)
        if cache_pages is None:
            sizing = CacheManager(config.groups, config.geometry, 0, prefix_cache=prefix_cache)
            row = sizing.pages_needed(context_length, config.max_plan_tokens)
            most = 1 + row * config.max_sequences  # that requests can lease; a prefix cache fills any number
            if free_pages is None:
                cache_pages = most
            else:
                cache_pages = free_pages() if prefix_cache else min(free_pages(), most)
        if cache_pages < 2:
            raise InvalidRequest("cache_pages", cache_pages, "at least 2 pages")
        arena = ArenaSpec(cache_pages, config.geometry.page_bytes, config.arena_dtype)
        if self.parts.bind is not None:
            self.parts.bind(arena)
            self._is_bound = True
        return arena

    def release(self) -> None:
        """Lets another engine bind the runner, if this one has; what is in flight is of no interest any more."""
        is_bound, self._is_bound = self._is_bound, False
        if is_bound:
            self.parts.unbind()
