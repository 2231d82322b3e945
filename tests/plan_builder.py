"""Builds BatchPlans by hand from the leaf contract, for runtime tests that want no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from resin.plan import (
    BatchPlan,
    Bucket,
    Phase,
    RowFlag,
    RunnerConfig,
    SamplingParams,
    SlotLoad,
    build_plan,
    plan_layout,
    smallest_bucket,
)
from resin.plan.layout import Header
from resin.plan.sampling import SAMPLING_COLUMNS

GREEDY = SamplingParams(temperature=0)


@dataclass
class PlannedSequence:
    """One sequence under test: its tokens so far, how many are cached, and its pages."""

    slot: int
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams = GREEDY
    cached: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass
class PlanBuilder:
    """Hands out pages in a scattered order and packs rows of sequences into plans of a History group."""

    config: RunnerConfig
    num_pages: int
    step: int = 0

    def __post_init__(self) -> None:
        order = np.random.default_rng(7).permutation(np.arange(1, self.num_pages))
        self.free = [int(page) for page in order]

    def sequence(self, slot: int, prompt: Sequence[int], params: SamplingParams = GREEDY) -> PlannedSequence:
        return PlannedSequence(slot, list(prompt), len(prompt), params)

    def prefill(
        self,
        chunks: Sequence[tuple[PlannedSequence, int]],
        bucket: Bucket | None = None,
        masks: dict[int, np.ndarray] | None = None,
    ) -> BatchPlan:
        """A plan that computes the next `count` uncached tokens of each sequence; emits where they reach the end."""
        return self._plan(Phase.PREFILL, chunks, bucket, masks or {}, from_slot=False)

    def decode(
        self,
        sequences: Sequence[PlannedSequence],
        bucket: Bucket | None = None,
        masks: dict[int, np.ndarray] | None = None,
        from_slot: bool = True,
    ) -> BatchPlan:
        """A plan that feeds each sequence its last token, out of its slot unless told otherwise."""
        return self._plan(Phase.DECODE, [(sequence, 1) for sequence in sequences], bucket, masks or {}, from_slot)

    def _plan(
        self,
        phase: Phase,
        chunks: Sequence[tuple[PlannedSequence, int]],
        bucket: Bucket | None,
        masks: dict[int, np.ndarray],
        from_slot: bool,
    ) -> BatchPlan:
        config, (group,), (fill,) = self.config, self.config.groups, self.config.geometry.groups
        for sequence, count in chunks:
            while len(sequence.pages) * fill.span_tokens < sequence.cached + count:
                sequence.pages.append(self.free.pop())
        tokens = sum(count for _, count in chunks)
        pages = sum(len(sequence.pages) for sequence, _ in chunks)
        bucket = bucket or smallest_bucket(config.buckets, phase, len(chunks), tokens, (pages,))
        assert bucket is not None and bucket.holds(len(chunks), tokens, (pages,))
        layout = plan_layout(bucket, config.groups, config.geometry)
        buffer = np.zeros(layout.words, np.int32)
        columns = layout.views(buffer)
        columns["slots"][:] = config.max_sequences
        columns["next_token"][:] = -1
        loads: list[SlotLoad] = []
        allowed: list[np.ndarray] = []
        token = page = top = 0
        for row, (sequence, count) in enumerate(chunks):
            end = sequence.cached + count
            fresh = sequence.tokens[sequence.cached : end]
            columns["token_ids"][token : token + len(fresh)] = fresh if not from_slot else 0
            columns["page_ids:" + group.name][page : page + len(sequence.pages)] = sequence.pages
            token, page = token + count, page + len(sequence.pages)
            columns["query_indptr"][row + 1 :] = token
            columns["page_indptr:" + group.name][row + 1 :] = page
            columns["computed"][row] = sequence.cached
            columns["slots"][row] = sequence.slot
            emits = from_slot or end == len(sequence.tokens)
            if not emits:
                columns["next_token"][row] = sequence.tokens[end]
            params = sequence.params
            columns["row_flags"][row] = row_flags(params, sequence, emits, from_slot, row in masks, phase)
            if emits and row in masks:
                allowed.append(pack_mask(masks[row]))
            top = max(top, params.logprobs or 0, params.prompt_logprobs or 0)
            fill_sampling(columns, row, params)
            if phase is Phase.PREFILL and emits and params.needs_slot_load:
                loads.append(slot_load(sequence, config.count_rows))
            sequence.cached = end
        columns["header"][:] = Header(len(chunks), tokens, np.bitwise_or.reduce(columns["row_flags"]), top)
        self.step += 1
        return build_plan(
            config,
            bucket,
            buffer,
            step=self.step,
            slot_loads=tuple(loads),
            allowed_masks=np.stack(allowed) if allowed else None,
        )


def row_flags(
    params: SamplingParams, sequence: PlannedSequence, emits: bool, from_slot: bool, masked: bool, phase: Phase
) -> int:
    """RowFlag bits of one row."""
    flags = RowFlag(0)
    if from_slot:
        flags |= RowFlag.FROM_SLOT
    if phase is Phase.PREFILL and sequence.cached == 0:
        flags |= RowFlag.FRESH_STATE
    if params.prompt_logprobs is not None and phase is Phase.PREFILL:
        flags |= RowFlag.PROMPT_LOGPROBS
    if not emits:
        return int(flags)
    flags |= RowFlag.EMIT
    conditions = {
        RowFlag.PENALTIES: params.has_penalties,
        RowFlag.BIAS: bool(params.logit_bias),
        RowFlag.SUPPRESS_STOP: len(sequence.tokens) - sequence.prompt_tokens < params.min_output_tokens,
        RowFlag.MASK: masked,
        RowFlag.LOGPROBS: params.logprobs is not None,
    }
    for flag, set_ in conditions.items():
        flags |= flag if set_ else RowFlag(0)
    return int(flags)


def fill_sampling(columns: dict[str, np.ndarray], row: int, params: SamplingParams) -> None:
    """Writes one row's sampling columns."""
    for column in SAMPLING_COLUMNS:
        columns[column.name][row] = column.value(params, params.seed or 0)


def slot_load(sequence: PlannedSequence, count_rows: int) -> SlotLoad:
    """What the device slot of a sequence needs before its first sampled token."""
    bias = sequence.params.logit_bias
    return SlotLoad(
        slot=sequence.slot,
        count_row=sequence.slot if sequence.params.has_penalties else count_rows,
        token_ids=np.asarray(sequence.tokens, np.int32),
        prompt_tokens=sequence.prompt_tokens,
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array(list(bias.values()), np.float32),
        stop_ids=np.array(sequence.params.stop_token_ids, np.int32),
    )


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """bool [V] -> int32 words, token 32 w + i in bit i of word w."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
