"""The programs of a bucket, and which of them runs a plan: the one place that says both."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import jax.numpy as jnp

from resin.pallas_kernels.fresh_prefill import fits_fresh_prefill
from resin.pallas_kernels.table import Backend, Kernels
from resin.plan import BatchPlan, Bucket, HistoryGroup, Phase, RowFlag, RunnerConfig, StepPlan
from resin.plan.flags import SPECIAL
from resin.plan.layout import HEADER
from resin.runtime.special import FEW_ROWS, special_counts


class ProgramKind(enum.Enum):
    """How many special rows a program takes (docs/architecture.md has the table), and what it leaves out.

    On a GPU a branch in a program makes the host wait for its condition, so each program takes a fixed number of
    special rows, and the host picks the program.
    """

    PLAIN = "plain"
    """No special row."""
    FEW = "few"
    """Up to FEW_ROWS special rows of more than FEW_OF_ROWS: decode."""
    ALL = "all"
    """Any rows may be special; in prefill, prompts may be scored."""
    FRESH = "fresh"
    """Plain, for one sequence that starts here: its tokens attend to themselves and read no pages."""
    ANY = "any"
    """Branches to what the plan needs: where branches cost nothing."""

    def special_counts(self, bucket: Bucket) -> tuple[int, ...]:
        """The R of special rows that the bucket's program of this kind can take, rising; it branches among several."""
        if self is ProgramKind.ANY:
            return special_counts(bucket.sequences)
        return ({ProgramKind.FEW: FEW_ROWS, ProgramKind.ALL: bucket.sequences}.get(self, 0),)

    def has_prompt_logprobs(self, bucket: Bucket) -> bool:
        """Whether the program scores prompts that ask for it."""
        return bucket.phase is Phase.PREFILL and self in (ProgramKind.ALL, ProgramKind.ANY)


_FRESH_STATE, _PROMPT_LOGPROBS = int(RowFlag.FRESH_STATE), int(RowFlag.PROMPT_LOGPROBS)

# Tokens of the smallest bucket with a fresh program; below, `paged_prefill` is as fast.
FRESH_BUCKET_TOKENS = 1024
# Share of its bucket that a fresh prompt has to fill. cuDNN computes the whole bucket, `paged_prefill` the live tokens:
# 900 and 1400 us for 8192 tokens, and time grows with their square, so that both are as fast at sqrt(900 / 1400) = 0.8.
FRESH_FILL = 0.8


def bucket_kinds(
    bucket: Bucket, config: RunnerConfig, kernels: Kernels, *, dtype: str, devices: int
) -> tuple[ProgramKind, ...]:
    """The programs that a bucket has.

    Args:
        bucket: one of the table.
        config: groups and arena.
        kernels: of the devices; plain XLA on CPU has one program for all plans, because branches cost nothing there.
        dtype: of the activations.
        devices: of the mesh.
    """
    if kernels.backend is Backend.REFERENCE:
        return (ProgramKind.ANY,)
    kinds: tuple[ProgramKind, ...] = (ProgramKind.PLAIN, ProgramKind.ALL)
    if bucket.phase is Phase.DECODE and FEW_ROWS in special_counts(bucket.sequences)[:-1]:
        kinds = (ProgramKind.PLAIN, ProgramKind.FEW, ProgramKind.ALL)
    is_long = bucket.phase is Phase.PREFILL and bucket.tokens >= FRESH_BUCKET_TOKENS
    if kernels.fresh_prefill is None or not is_long or devices > 1 or not _has_fresh_layers(config, dtype):
        return kinds
    return (*kinds, ProgramKind.FRESH)


def plan_kind(plan: BatchPlan, kinds: Sequence[ProgramKind]) -> ProgramKind:
    """The program, among those of the plan's bucket, that runs a plan.

    With one sequence the union of the rows' flags says whether it starts here: neither a cached prefix nor an earlier
    chunk comes before its tokens.
    """
    if ProgramKind.ANY in kinds:
        return ProgramKind.ANY
    flags = int(plan.buffer[HEADER.any_flags])
    if flags & (SPECIAL | _PROMPT_LOGPROBS):
        return ProgramKind.FEW if ProgramKind.FEW in kinds and plan.num_special <= FEW_ROWS else ProgramKind.ALL
    if ProgramKind.FRESH in kinds and flags & _FRESH_STATE and plan.num_sequences == 1:
        return ProgramKind.FRESH if plan.num_tokens >= FRESH_FILL * plan.bucket.tokens else ProgramKind.PLAIN
    return ProgramKind.PLAIN


# What holds the plans of all replicas: the last of these that one of them needs.
_RISING = (ProgramKind.ANY, ProgramKind.FRESH, ProgramKind.PLAIN, ProgramKind.FEW, ProgramKind.ALL)


def step_kind(step: StepPlan, kinds: Sequence[ProgramKind]) -> ProgramKind:
    """The same of a step: every replica runs one program."""
    return max((plan_kind(plan, kinds) for plan in step.plans), key=_RISING.index)


def _has_fresh_layers(config: RunnerConfig, dtype: str) -> bool:
    """Whether the cache has a place for a layer that could attend without it."""
    return jnp.dtype(config.arena_dtype).itemsize == 2 and any(
        plane.dtype is None and fits_fresh_prefill(dtype, plane.width)
        for group in config.groups
        if isinstance(group, HistoryGroup) and group.tokens_per_entry == 1
        for plane in group.planes
    )
