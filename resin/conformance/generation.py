"""Running requests through engines that share one warm runner, and comparing what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from resin import (
    Bucket,
    Engine,
    Phase,
    Request,
    RunnerConfig,
    SamplingParams,
    TokensEvent,
)

TOP = 5


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and how to go on from it."""

    prompt: np.ndarray  # int32 [P]
    params: SamplingParams


@dataclass(slots=True)
class Trace:
    """What one job gave.

    Attributes:
        request: the finished request.
        token_ids: generated tokens.
        logprobs: of these tokens.
        top: the TOP largest logprobs at each place.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[np.ndarray] = field(default_factory=list)

    def add(self, token_ids: np.ndarray, logprobs: np.ndarray, top: np.ndarray) -> None:
        self.token_ids += token_ids.tolist()
        self.logprobs += logprobs.tolist()
        self.top += list(top)


def generate(engine: Engine, jobs: Sequence[Job], *, alone: bool = False) -> list[Trace]:
    """Runs jobs to their ends, all at once or one after another."""
    traces: list[Trace] = []
    for batch in [[job] for job in jobs] if alone else [list(jobs)]:
        live = [Trace(engine.submit(job.prompt, sampling_params=job.params)) for job in batch]
        by_id = {trace.request.id: trace for trace in live}
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, TokensEvent):
                    for row in event:
                        assert row.logprobs is not None and row.top_logprobs is not None
                        by_id[row.request.id].add(row.token_ids, row.logprobs, row.top_logprobs)
        for trace in live:
            trace.request.take_result()
        traces += live
    return traces


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two runs of the same jobs differ.

    Attributes:
        fault: the first difference that matters, or None.
        largest: largest difference of a logprob.
        near_ties: places where a greedy choice fell the other way although both were within the tolerance.
    """

    fault: str | None
    largest: float
    near_ties: int

    def __str__(self) -> str:
        ties = f", {self.near_ties} near ties" if self.near_ties else ""
        return self.fault or f"largest logprob difference {self.largest:.1e}{ties}"


def difference_of(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays, 0 where they are equal; NaN, which no bound admits, if either holds one."""
    with np.errstate(invalid="ignore"):
        return float(np.where(one == other, 0, np.abs(one - other)).max(initial=0.0))


def compare(expected: Sequence[Trace], got: Sequence[Trace], tolerance: float) -> Comparison:
    """Tokens must be the same, and logprobs within the tolerance; a row ends at a near tie."""
    largest, near_ties = 0.0, 0
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        if len(one.token_ids) != len(other.token_ids):
            return Comparison(f"job {index}: {len(other.token_ids)} tokens, expected {len(one.token_ids)}", largest, 0)
        for place, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            difference = difference_of(one.top[place], other.top[place])
            largest = max(largest, difference)
            if not difference <= tolerance:
                return Comparison(
                    f"job {index}, token {place}: logprobs differ by {difference:.1e}", largest, near_ties
                )
            if a != b:
                gap = float(one.top[place][0] - one.top[place][1])
                if one.request.params.temperature > 0 or gap > 2 * tolerance:
                    return Comparison(f"job {index}, token {place}: {b}, expected {a} by {gap:.1e}", largest, near_ties)
                near_ties += 1
                break
    return Comparison(None, largest, near_ties)


def forced(token_ids: Sequence[int], vocab_size: int) -> Callable[[Sequence[int]], np.ndarray]:
    """An `allowed_tokens` hook that leads generation along given tokens."""

    def allow(generated: Sequence[int]) -> np.ndarray:
        mask = np.zeros(vocab_size, np.bool_)
        mask[token_ids[len(generated)]] = True
        return mask

    return allow


def buckets_of(config: RunnerConfig, prefill: int, decode: int) -> tuple[Bucket, ...]:
    """A table of one prefill and one decode bucket, by their places in the full table."""
    return config.of_phase(Phase.PREFILL)[prefill], config.of_phase(Phase.DECODE)[decode]
