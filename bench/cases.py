"""One benchmark case: B sequences of C tokens in one phase, its buckets, and a plan that can run again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from resin import (
    BatchPlan,
    Bucket,
    Engine,
    ForwardOutput,
    Phase,
    Policy,
    RowFlag,
    RunnerConfig,
    SamplingParams,
)
from resin.plan import build_plan
from resin.plan.layout import HEADER
from resin.runtime.bucket_table import build_buckets
from resin.sched.cache import CacheManager

# Prefill tokens a plan while a decode case fills its contexts, and sequences that one such plan packs.
FEED_TOKENS = 2048
FEED_SEQUENCES = 16
# Prefill plans never give way to decode rows: a case starts when all of its sequences are there.
PATIENT = Policy(prefill_streak_tokens=1 << 30)
NO_FLAGS = RowFlag(0)


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed.

    Attributes:
        phase: decode adds one token to each sequence; prefill computes whole prompts.
        sequences: B.
        context_tokens: tokens of a sequence after the step.
        slack_tokens: tokens that a sequence may grow beyond that, for engine-driven decode.
    """

    phase: Phase
    sequences: int
    context_tokens: int
    slack_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.phase.name.lower()} {self.sequences}x{self.context_tokens}"

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence that the case's buckets and pages hold; one more than a prompt, for the token it emits."""
        return self.context_tokens + self.slack_tokens + 1

    @property
    def plan_tokens(self) -> int:
        """Padded tokens of the case's prefill bucket."""
        if self.phase is Phase.PREFILL:
            return self.sequences * self.context_tokens
        return max(16, min(FEED_TOKENS, 1 << (self.context_tokens - 1).bit_length()))

    def buckets(self, config: RunnerConfig) -> tuple[Bucket, ...]:
        """One prefill and one decode bucket; the case's own is exact, the other one feeds or follows it."""
        feeding = min(FEED_SEQUENCES, self.plan_tokens)
        return build_buckets(
            config.groups,
            config.geometry,
            decode_sequences=(self.sequences,),
            prefill_tokens=(self.plan_tokens,),
            prefill_sequences=self.sequences if self.phase is Phase.PREFILL else feeding,
            max_context_tokens=self.max_context_tokens,
        )

    def bucket(self, config: RunnerConfig) -> Bucket:
        """The bucket that is timed."""
        return next(bucket for bucket in self.buckets(config) if bucket.phase is self.phase)

    def pages(self, config: RunnerConfig) -> int:
        """Pages that the case's sequences lease at most."""
        cache = CacheManager(config.groups, config.geometry, 0, prefix_cache=False)
        return self.sequences * cache.pages_needed(self.max_context_tokens, self.plan_tokens)

    def changes(self, config: RunnerConfig) -> dict[str, Any]:
        """What makes a config one with this case's buckets and no others."""
        return {"buckets": self.buckets(config), "max_plan_tokens": self.plan_tokens}


class PlanSource:
    """A runner that keeps the plans it gets and emits zeros."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.plans: list[BatchPlan] = []

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        self.plans.append(plan)
        emits = plan.emits
        indptr = np.concatenate([[0], np.cumsum(emits)])
        return ForwardOutput(token_ids=np.zeros(int(emits.sum()), np.int32), token_indptr=indptr)


def random_prompts(case: Case, vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """int32 prompts of these lengths, each its own."""
    rng = np.random.default_rng((seed, case.sequences, case.context_tokens))
    return [rng.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


def resident_plan(case: Case, config: RunnerConfig, num_pages: int, params: SamplingParams) -> BatchPlan:
    """The plan that the engine's own planner makes for a case, moved to pages drawn at random from the whole arena.

    Raises:
        RuntimeError: the planner did not put the case into one plan.
    """
    source = PlanSource(replace(config, **case.changes(config)))
    # The last token of a decoding sequence is the first one that it emitted.
    lengths = [case.context_tokens - (case.phase is Phase.DECODE)] * case.sequences
    engine = Engine(
        source,
        context_length=case.max_context_tokens,
        cache_pages=num_pages,
        enable_metrics=False,
        policy=PATIENT,
    )
    with engine:
        for seed, prompt in enumerate(random_prompts(case, config.vocab_size, lengths)):
            # Every row draws with a seed of its own, and none ends before the plan is there.
            engine.submit(prompt, sampling_params=replace(params, seed=seed, max_output_tokens=2, ignore_stop=True))
        while not (source.plans and source.plans[-1].phase is case.phase):
            engine.step()
        plan = source.plans[-1]
    if plan.num_sequences != case.sequences or (plan.seq_lens[: case.sequences] != case.context_tokens).any():
        raise RuntimeError(f"{case}: the planner made {plan.num_sequences} rows of {plan.seq_lens} tokens")
    if case.phase is Phase.DECODE:
        # Each row a token of its own, as in the middle of a run. From its slot it would stand further on at every run.
        token_ids = np.concatenate(random_prompts(case, config.vocab_size, [case.sequences], 1))
        plan = _without_slots(plan, config, token_ids)
    return scatter_pages(plan, config, num_pages)


def _without_slots(plan: BatchPlan, config: RunnerConfig, token_ids: np.ndarray) -> BatchPlan:
    """The same decode plan with these tokens and every row in the scratch slot.

    An engine that decodes beside it keeps the lengths of its sequences in the slots: another length there would send
    its rows to pages that they do not have.
    """
    buffer = plan.buffer.copy()
    columns = plan.layout.views(buffer)
    columns["token_ids"][: len(token_ids)] = token_ids
    columns["slots"][:] = config.max_sequences
    return build_plan(config, plan.bucket, buffer, step=plan.step, request_ids=plan.request_ids)


def with_flags(
    plan: BatchPlan,
    config: RunnerConfig,
    *,
    add: RowFlag = NO_FLAGS,
    drop: RowFlag = NO_FLAGS,
    top_logprobs: int | None = None,
    is_greedy: bool = False,
) -> BatchPlan:
    """The same plan with other flags on its live rows, as many most likely tokens to report, and perhaps greedy."""
    buffer = plan.buffer.copy()
    columns = plan.layout.views(buffer)
    flags = columns["row_flags"][: plan.num_sequences]
    flags[:] = (flags | int(add)) & ~int(drop)
    columns["header"][HEADER.any_flags] = np.bitwise_or.reduce(flags)
    if top_logprobs is not None:
        columns["header"][HEADER.top_logprobs] = top_logprobs
    if is_greedy:
        columns["temperature"][:] = 0
    return build_plan(config, plan.bucket, buffer, step=plan.step, request_ids=plan.request_ids)


def scatter_pages(plan: BatchPlan, config: RunnerConfig, num_pages: int, seed: int = 0) -> BatchPlan:
    """The same plan over a random permutation of the pages, as after hours of service; page 0 stays scratch."""
    moved = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(num_pages - 1)]).astype(np.int32)
    buffer = plan.buffer.copy()
    for name, column in plan.layout.views(buffer).items():
        if name.split(":")[0] in ("page_ids", "input_pages", "output_pages"):
            column[:] = moved[column]
    return build_plan(config, plan.bucket, buffer, step=plan.step, request_ids=plan.request_ids)
