"""An engine's hold on its runner: what it offers, the arena that is bound to it meanwhile, and the way to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resin.plan import ArenaSpec, ForwardOutput, InvalidRequest, OverlapRunner, StepPlan
from resin.plan.config import MAX_OVERLAP
from resin.plan.runner import RunnerParts
from resin.record import PlanRecorder
from resin.sched.cache import CacheManager


class Binding:
    """A runner as its engine sees it.

    Args:
        overlap: plans that may be in flight while the next one is made, None to leave it open.
        context_length: of each sequence, None for as long as the runner can.

    Attributes:
        parts: what it offers beside `forward`.
        context_length: longest sequence in tokens.
        wanted_overlap: the same, 0 if the runner cannot.
        overlap: as it was chosen.

    Raises:
        InvalidRequest: no runner, or not such a one.
    """

    def __init__(self, runner: Any, overlap: int | None, context_length: int | None) -> None:
        self.parts = RunnerParts.of(runner)
        longest = self.parts.config.max_context_tokens
        self.context_length = longest if context_length is None else context_length
        if not 2 <= self.context_length <= longest:
            raise InvalidRequest("context_length", context_length, f"2 to {longest}")
        if overlap is not None and overlap not in range(MAX_OVERLAP + 1):
            raise InvalidRequest("overlap", overlap, f"0 to {MAX_OVERLAP} plans, or None")
        self.wanted_overlap = overlap if isinstance(runner, OverlapRunner) else 0
        self.overlap = 0
        self._runner = runner
        self._recorder: PlanRecorder | None = None
        self._is_bound = False

    def bind(self, cache_pages: int | None, *, prefix_cache: bool) -> ArenaSpec:
        """Sizes the arena and binds the runner to it.

        Args:
            cache_pages: None takes what all slots would lease, of what the runner has, or all that for a prefix cache.
            prefix_cache: whether pages are kept for later requests.

        Raises:
            InvalidRequest: too few pages, or the runner refuses.
        """
        config, free_pages = self.parts.config, self.parts.free_pages
        if not config.groups:
            return ArenaSpec(0, 0, config.arena_dtype)
        if cache_pages is None:
            sizing = CacheManager(config.groups, config.geometry, 0, prefix_cache=prefix_cache)
            row = sizing.pages_needed(self.context_length, config.max_plan_tokens)
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

    def record(self, path: Path, arena: ArenaSpec) -> None:
        """Writes every plan and output to a file from now on."""
        self._recorder = PlanRecorder(path, self.parts.config, arena)

    def accept(self, step: StepPlan) -> None:
        """Lets the runner refuse a step.

        Raises:
            PlanRejected: it does.
        """
        self.parts.accept(self._taken(step))

    def dispatch(self, step: StepPlan) -> Any:
        """Starts a step, or runs it if steps do not overlap."""
        if self._recorder is not None:
            self._recorder.write_step(step)
        taken = self._taken(step)
        return self._runner.dispatch(taken) if self.overlap else self._runner.forward(taken)

    def collect(self, step: StepPlan, handle: Any) -> Sequence[ForwardOutput]:
        """Waits for what `dispatch` started: an output of each replica."""
        found = self._runner.collect(handle) if self.overlap else handle
        outputs: Sequence[ForwardOutput] = found if self.parts.config.replicas > 1 else [found]
        if self._recorder is not None:
            self._recorder.write_outputs(step, outputs)
        return outputs

    def _taken(self, step: StepPlan) -> Any:
        """What the runner takes: the plan of its only replica, or those of all."""
        return step if self.parts.config.replicas > 1 else step.plans[0]

    def release(self) -> None:
        """Lets another engine bind the runner, if this one has; what is in flight is of no interest any more."""
        is_bound, self._is_bound = self._is_bound, False
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is not None:
                recorder.close()
        finally:
            if is_bound:
                self.parts.unbind()
