"""Masks of allowed tokens on their way to a program: bits, in blocks of 8 rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from resin.plan import BatchPlan, PlanRejected, RowFlag, RunnerConfig, StepPlan
from resin.plan.layout import HEADER
from resin.runtime.special import MASK_ROWS

_MASK = int(RowFlag.MASK)


def no_masks(config: RunnerConfig) -> np.ndarray:
    """int32 [MASK_ROWS, words], a block that allows nothing, for rows without masks."""
    return np.zeros((MASK_ROWS, _words(config)), np.int32)


def mask_bytes(config: RunnerConfig) -> int:
    """Of such a block."""
    return 4 * MASK_ROWS * _words(config)


def check_masks(plan: BatchPlan, config: RunnerConfig) -> None:
    """Raises PlanRejected if the plan's masks are not of the shape that its rows ask for."""
    masked = len(plan.masked_rows) if plan.buffer[HEADER.any_flags] & _MASK else 0
    expected = (masked, _words(config)) if masked else None
    shape = None if plan.allowed_masks is None else plan.allowed_masks.shape
    if shape != expected:
        raise PlanRejected(f"allowed_masks has shape {shape}, expected {expected}")


def blocks_of(step: StepPlan, blocks: int, nothing: Any) -> tuple[Any, ...]:
    """The masks of a step's plans in so many blocks, those of all replicas one below the other; `nothing` stands where
    there are none."""
    each = [_blocks_of(plan) for plan in step.plans]
    count = max(map(len, each))
    if len(each) > 1 and count:
        none = np.zeros_like(max(each, key=len)[0])
        each = [[*masks, *[none] * (count - len(masks))] for masks in each]
    joined = (np.concatenate(masks) if len(masks) > 1 else masks[0] for masks in zip(*each, strict=True))
    return (*joined, *[nothing] * (blocks - count))


def _blocks_of(plan: BatchPlan) -> list[np.ndarray]:
    masks: list[np.ndarray] = []
    if plan.allowed_masks is not None:
        for start in range(0, len(plan.allowed_masks), MASK_ROWS):
            block = plan.allowed_masks[start : start + MASK_ROWS]
            masks.append(block if len(block) == MASK_ROWS else np.pad(block, ((0, MASK_ROWS - len(block)), (0, 0))))
    return masks


def _words(config: RunnerConfig) -> int:
    return -(-config.vocab_size // 32)
