"""ResolvedConfig: what an engine runs with, once everything is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from resin.plan import ArenaSpec, Phase, RunnerConfig, RunnerParts, StepTimes
from resin.sched.scheduler import Scheduler

# Prefill plans in a row while rows wait to decode, of a runner that has measured nothing.
UNMEASURED_PLANS = 8


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The settings of a running engine.

    Attributes:
        max_sequences, context_length, max_plan_tokens: limits.
        prefill_buckets, decode_buckets: padded tokens and padded sequences of the compiled shapes.
        num_pages, page_bytes: of the arena.
        prefix_cache: whether prefixes are reused.
        overlap: plans in flight while the next is made.
        prefill_streak_tokens: bucket tokens of prefill that rows which decode wait for at most.
        decode_step_s, read_back_s: of the smallest decode bucket, as measured at warm-up; None: not measured.
        draft_tokens: drafts that a decode step checks of a sequence at most.
        draft_costs: (sequences, time of a step that checks them over that of one that does not), as measured.
        runner: what the runner says of itself, such as dtype, kernels and kinds of programs.
    """

    max_sequences: int
    context_length: int
    max_plan_tokens: int
    prefill_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    num_pages: int
    page_bytes: int
    prefix_cache: bool
    overlap: int
    prefill_streak_tokens: int
    decode_step_s: float | None
    read_back_s: float | None
    draft_tokens: int
    draft_costs: tuple[tuple[int, float], ...]
    runner: Mapping[str, str]

    def as_record(self) -> dict[str, Any]:
        """The same as JSON holds it."""
        return asdict(self) | {"runner": dict(self.runner)}

    def __str__(self) -> str:
        def table(sizes: tuple[int, ...]) -> str:
            return ",".join(map(str, sizes)) or "any"

        costs = " ".join(f"{cost:.2f}x of {sequences}" for sequences, cost in self.draft_costs)
        drafts = f"drafts {self.draft_tokens} (a step with them {costs or 'not measured'})"
        measured = "not measured" if self.decode_step_s is None else f"step {self.decode_step_s * 1e3:.2f} ms"
        return "; ".join(
            [
                *(f"{name} {value}" for name, value in self.runner.items()),
                f"{self.max_sequences} sequences of {self.context_length} tokens",
                f"{self.num_pages} pages of {self.page_bytes} bytes",
                f"prefix cache {'on' if self.prefix_cache else 'off'}",
                f"prefill buckets {table(self.prefill_buckets)}",
                f"decode buckets {table(self.decode_buckets)}",
                f"overlap {self.overlap} ({measured})",
                *([drafts] if self.draft_tokens else []),
                f"at most {self.prefill_streak_tokens} tokens of prefill between decode steps",
            ]
        )


def pick_overlap(times: StepTimes | None) -> int:
    """2 where reading a step back takes longer than the step, which one plan ahead cannot hide; else 1."""
    return 2 if times is not None and times.read_back_s > times.decode_s else 1


def pick_streak(config: RunnerConfig, times: StepTimes | None, wait_s: float, max_plan_tokens: int) -> int:
    """Bucket tokens of prefill that take about `wait_s`: the largest bucket that does not take longer, or as many of
    the largest of all as fit, and at least the smallest bucket."""
    sizes = config.bucket_sizes(Phase.PREFILL)
    if times is None or not sizes:
        return UNMEASURED_PLANS * max_plan_tokens
    fits = [(tokens, seconds) for tokens, seconds in times.prefill_s if seconds <= wait_s]
    if not fits:
        return sizes[0]
    tokens, seconds = max(fits)
    return tokens if tokens < sizes[-1] else tokens * max(1, int(wait_s / max(seconds, 1e-6)))


def resolve(
    parts: RunnerParts,
    scheduler: Scheduler,
    context_length: int,
    arena: ArenaSpec,
    overlap: int | None,
    times: StepTimes | None,
) -> ResolvedConfig:
    """Chooses what was left open, by what the runner has measured.

    Args:
        parts, scheduler, context_length, arena: of the engine, settled already.
        overlap: None leaves it open.
        times: what the runner has measured.
    """
    config, policy, max_plan_tokens = parts.config, scheduler.policy, scheduler.max_plan_tokens
    streak = policy.prefill_streak_tokens or pick_streak(config, times, policy.decode_wait_s, max_plan_tokens)
    return ResolvedConfig(
        max_sequences=config.max_sequences,
        context_length=context_length,
        max_plan_tokens=max_plan_tokens,
        prefill_buckets=config.bucket_sizes(Phase.PREFILL),
        decode_buckets=config.bucket_sizes(Phase.DECODE),
        num_pages=arena.num_pages,
        page_bytes=arena.page_bytes,
        prefix_cache=scheduler.replicas[0].cache.prefixes.enabled,
        overlap=pick_overlap(times) if overlap is None else int(overlap),
        prefill_streak_tokens=streak,
        decode_step_s=None if times is None else times.decode_s,
        read_back_s=None if times is None else times.read_back_s,
        draft_tokens=config.draft_tokens,
        draft_costs=() if times is None else times.draft_costs,
        runner=parts.facts(),
    )
