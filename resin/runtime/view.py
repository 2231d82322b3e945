"""RunnerView: a bound runner as several engines see it, one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resin.plan import ArenaSpec, BatchPlan, InvalidRequest, RunnerConfig, RunnerParts, StepPlan


class RunnerView:
    """The same programs, weights and arena, with a config of its own. Engines bind the view; the runner stays bound.

    Args:
        runner: bound.
        arena: that it is bound to.
        changes: fields of its config to replace; limits may shrink, buckets may be left out.
    """

    def __init__(self, runner: Any, arena: ArenaSpec, **changes: Any) -> None:
        self._runner, self._arena = runner, arena
        parts = RunnerParts.of(runner)
        self.accept = parts.accept
        self.config: RunnerConfig = replace(parts.config, **changes)

    def free_pages(self) -> int:
        return self._arena.num_pages

    def bind(self, arena: ArenaSpec) -> None:
        if arena.num_pages > self._arena.num_pages:
            raise InvalidRequest("num_pages", arena.num_pages, f"at most {self._arena.num_pages}")

    def dispatch(self, plan: BatchPlan | StepPlan) -> Any:
        return self._runner.dispatch(plan)

    def collect(self, handle: Any) -> Any:
        return self._runner.collect(handle)

    def forward(self, plan: BatchPlan | StepPlan) -> Any:
        return self.collect(self.dispatch(plan))
