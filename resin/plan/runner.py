"""The contract between the Engine and whatever executes its plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from resin.plan.batch import BatchPlan
from resin.plan.config import ArenaSpec, RunnerConfig, StepTimes
from resin.plan.errors import InvalidRequest
from resin.plan.output import ForwardOutput


@runtime_checkable
class Runner(Protocol):
    """The minimal runner: one method, NumPy only. RunnerParts has what else a runner may offer."""

    def forward(self, plan: BatchPlan) -> ForwardOutput: ...


@runtime_checkable
class OverlapRunner(Protocol):
    """A runner that can hold plans in flight while the Engine makes the next.

    Plans execute in dispatch order; FROM_SLOT rows read what the previous plan emitted.
    """

    def forward(self, plan: BatchPlan) -> ForwardOutput: ...

    def dispatch(self, plan: BatchPlan) -> Any: ...

    def collect(self, handle: Any) -> ForwardOutput: ...


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner offers beside `forward`: each of these attributes may be absent, and stands here as its default.

    Attributes:
        config: what the Engine plans within.
        free_pages: how many pages fit memory; None: any number.
        bind: called with the arena by each engine that gets the runner; None: the runner keeps its own cache.
        unbind: called when an engine is done, after which nothing may be in flight.
        accept: may raise PlanRejected while nothing has happened yet.
        observations: numbers to export as metrics, by name.
        step_times: what its steps take, if that was measured: an engine chooses overlap and chunk sizes by it.
        facts: what it runs with, by name, for people: dtype, kernels, kinds of programs.
        tokenizer: a ChatTokenizer, for servers.
        eos_token_ids: ids that end a turn by the checkpoint's own account, for servers.
    """

    config: RunnerConfig = RunnerConfig()  # noqa: RUF009 (frozen)
    free_pages: Callable[[], int] | None = None
    bind: Callable[[ArenaSpec], None] | None = None
    unbind: Callable[[], None] = _nothing
    accept: Callable[[BatchPlan], None] = _nothing
    observations: Callable[[], Mapping[str, float]] = dict
    step_times: Callable[[], StepTimes | None] = lambda: None
    facts: Callable[[], Mapping[str, str]] = dict
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, runner: object) -> RunnerParts:
        """What the runner has of these.

        Raises:
            InvalidRequest: it is no runner, or its `config` is something else.
        """
        if not isinstance(runner, Runner):
            raise InvalidRequest("runner", runner, "an object with forward(plan)")
        found = {field.name: getattr(runner, field.name, None) for field in fields(cls)}
        parts = cls(**{name: part for name, part in found.items() if part is not None})
        if not isinstance(parts.config, RunnerConfig):
            raise InvalidRequest("runner.config", parts.config, "a RunnerConfig")
        return parts
