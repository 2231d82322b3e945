"""Runners and models without arithmetic, for tests of the engine and the server.

`PagedFake` keeps a physical arena in NumPy and predicts each token from what it reads through the plan's page rows
alone, so a wrong page, offset, state or slot changes the tokens. `expected_tokens` predicts them from token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from resin import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    CacheGeometry,
    CacheGroup,
    ForwardOutput,
    HistoryGroup,
    Phase,
    Plane,
    RowFault,
    RowFlag,
    RunnerConfig,
    StateGroup,
    WindowGroup,
    plan_geometry,
)
from resin.plan.cache import GroupGeometry

VOCAB = 251
_POISON = -(10**9)


def history_group(tokens_per_entry: int = 1, name: str = "history", rows: int = 2) -> HistoryGroup:
    return HistoryGroup(name, (Plane("kv", rows, 4),), tokens_per_entry)


def window_group(window_tokens: int, name: str = "window", rows: int = 2) -> WindowGroup:
    return WindowGroup(name, (Plane("kv", rows, 4),), window_tokens)


def state_group(checkpoint_tokens: int = 16, rows: int = 8, name: str = "state") -> StateGroup:
    return StateGroup(name, (Plane("s", rows, 4),), checkpoint_tokens)


def fake_config(
    groups: tuple[CacheGroup, ...],
    *,
    page_tokens: int = 4,
    max_sequences: int = 4,
    max_context_tokens: int = 256,
    max_plan_tokens: int = 32,
    buckets: bool = True,
    spans: Sequence[int] = (),
    table: Sequence[Bucket] = (),
) -> RunnerConfig:
    """A table of a few buckets, unless another is given. `spans` are tokens a page of each group (0 for a State)
    instead of those that `plan_geometry` picks: the widths of a real model's layers make such pages, Gemma 3 1B ones of
    88 and 16 tokens."""
    if spans:
        geometry = geometry_of_spans(groups, spans)
    else:
        geometry = plan_geometry(groups, arena_dtype="float32", page_tokens=page_tokens if groups else None)
    spans = [fill.span_tokens for fill in geometry.groups]

    def bucket(phase: Phase, sequences: int, tokens: int) -> Bucket:
        rows = [sequences * (-(-max_context_tokens // span) + 1) if span else 0 for span in spans]
        return Bucket(phase, sequences, tokens, tuple(rows))

    usual = [bucket(Phase.PREFILL, min(tokens, max_sequences), tokens) for tokens in (8, max_plan_tokens)]
    usual += [bucket(Phase.DECODE, sequences, sequences) for sequences in sorted({1, max_sequences})]
    return RunnerConfig(
        vocab_size=VOCAB,
        max_sequences=max_sequences,
        max_context_tokens=max_context_tokens,
        max_plan_tokens=max_plan_tokens,
        groups=groups,
        geometry=geometry,
        buckets=tuple(table or usual) if buckets else (),
    )


def geometry_of_spans(groups: Sequence[CacheGroup], spans: Sequence[int]) -> CacheGeometry:
    align = math.lcm(*(span for span in spans if span))
    checkpoints = [group.checkpoint_tokens for group in groups if isinstance(group, StateGroup)]
    fills = tuple(GroupGeometry(max(span, 1), span, int(span == 0), 0.0) for span in spans)
    return CacheGeometry(4096, fills, align, -(-max(checkpoints, default=1) // align) * align)


def mix(value: int, token: int) -> int:
    return (value * 1_000_003 + int(token) * 7_919 + 17) % 2_147_483_647


def expected_tokens(config: RunnerConfig, prompt: list[int], count: int) -> list[int]:
    """The fake's greedy continuation, from token ids alone."""
    tokens = list(prompt)
    for _ in range(count):
        value = 1
        for group in config.groups:
            if isinstance(group, StateGroup):
                state = 5
                for token in tokens:
                    state = mix(state, token)
                value = mix(value, state)
            else:
                first = max(len(tokens) - group.window_tokens, 0) if isinstance(group, WindowGroup) else 0
                ratio = group.tokens_per_entry
                for position in range(first, len(tokens)):
                    if (position + 1) % ratio == 0 or ratio == 1:
                        value = mix(value, tokens[position])
        value = mix(value, tokens[-1])
        tokens.append(value % VOCAB)
    return tokens[len(prompt) :]


class PagedFake:
    """A runner that reads and writes a NumPy arena exactly as the plans say, and checks what it reads.

    Attributes:
        fail: maps a stage ("accept", "dispatch", "collect", "forward") to an exception to raise at the next call.
        check: called with every plan before it runs.
        faults: a request's id -> (tokens of its sequence, the RowFault that it gets in place of the next one).
    """

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.fail: dict[str, BaseException] = {}
        self.plans: list[BatchPlan] = []
        self.check: Callable[[BatchPlan], None] = lambda plan: None
        self.faults: dict[int, tuple[int, RowFault]] = {}
        self.slots = np.full((config.max_sequences + 1, 2), _POISON, np.int64)  # last token and length

    def bind(self, arena: ArenaSpec) -> None:
        entries = max((fill.page_entries for fill in self.config.geometry.groups), default=1)
        # Every group shares the physical pages: a page handed to two owners corrupts both.
        self.arena = np.full((arena.num_pages, entries, 2), _POISON, np.int64)

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        self._maybe_fail("forward")
        return self._execute(plan)

    def _maybe_fail(self, stage: str) -> None:
        error = self.fail.pop(stage, None)
        if error is not None:
            raise error

    def accept(self, plan: BatchPlan) -> None:
        self._maybe_fail("accept")

    def _execute(self, plan: BatchPlan) -> ForwardOutput:
        self.plans.append(plan)
        self._check_padding(plan)
        self.check(plan)
        tokens = plan.token_ids.astype(np.int64)
        live = [row for row in range(plan.num_sequences) if not self._is_padding(plan, row)]
        for row in live:
            if plan.row_flags[row] & RowFlag.FROM_SLOT:
                tokens[plan.query_indptr[row]], length = self.slots[plan.slots[row]]
                assert length == plan.computed[row], "the host does not know the slot's length"
        self._append(plan, tokens)
        emitted, indptr = [], [0]
        for row in range(plan.num_sequences):
            value = self._row_value(plan, row, tokens) if row in live else _POISON
            if plan.row_flags[row] & RowFlag.EMIT:
                at, fault = self.faults.get(plan.request_ids[row], (-1, None))
                emitted.append(value % VOCAB if fault is None or plan.seq_lens[row] < at else int(fault))
            self.slots[plan.slots[row]] = value % VOCAB, plan.seq_lens[row]
            indptr.append(len(emitted))
        dtype = np.int32 if self.faults else np.uint32
        return ForwardOutput(np.asarray(emitted, dtype), np.asarray(indptr, np.uint32))

    def _check_padding(self, plan: BatchPlan) -> None:
        assert not plan.buffer.flags.writeable and not plan.token_ids.flags.writeable
        assert plan.num_sequences <= plan.bucket.sequences and plan.num_tokens <= plan.bucket.tokens
        assert (plan.row_flags[plan.num_sequences :] == 0).all()
        assert (plan.slots[plan.num_sequences :] == self.config.max_sequences).all()
        assert (plan.query_indptr[plan.num_sequences :] == plan.num_tokens).all()

    def _is_padding(self, plan: BatchPlan, row: int) -> bool:
        """True for an empty place between the rows of a decode plan, which must read and write nothing of anybody's."""
        if plan.slots[row] != self.config.max_sequences:
            return False
        assert plan.phase is Phase.DECODE and row < plan.num_sequences - 1 and plan.request_ids[row] == -1
        assert not plan.computed[row] and not plan.row_flags[row] and not plan.token_ids[row]
        for group in plan.groups:
            if group.page_indptr is not None and group.first_position is not None:
                assert group.page_indptr[row] == group.page_indptr[row + 1] and not group.first_position[row]
            elif group.input_pages is not None and group.output_pages is not None:
                assert not group.input_pages[row].any() and not group.output_pages[row].any()
        return True

    def _append(self, plan: BatchPlan, tokens: np.ndarray) -> None:
        for group in plan.groups:
            if group.page_ids is None:
                continue
            pages, offsets = plan.append_places(group.name)
            kept = pages > 0
            self.arena[pages[kept], offsets[kept], 0] = tokens[kept]
            self.arena[pages[kept], offsets[kept], 1] = plan.positions[kept]

    def _row_value(self, plan: BatchPlan, row: int, tokens: np.ndarray) -> int:
        value = 1
        length, start = int(plan.seq_lens[row]), int(plan.computed[row])
        query = range(plan.query_indptr[row], plan.query_indptr[row + 1])
        assert len(query) > 0
        for spec, fill, group in zip(self.config.groups, self.config.geometry.groups, plan.groups, strict=True):
            if isinstance(spec, StateGroup):
                value = mix(value, self._advance_state(plan, row, group, [int(tokens[t]) for t in query]))
                continue
            assert group.page_indptr is not None and group.page_ids is not None and group.first_position is not None
            pages = group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]]
            origin = int(group.first_position[row])
            # Every query of the chunk needs its window, the first one reaches back furthest.
            first = 0
            if isinstance(spec, WindowGroup):
                first = max(length - spec.window_tokens, 0)
                assert origin <= max(start - spec.window_tokens + 1, 0)
            else:
                assert origin == 0
            ratio = spec.tokens_per_entry
            for position in range(first, length):
                if (position + 1) % ratio == 0 or ratio == 1:
                    page = pages[(position - origin) // fill.span_tokens]
                    token, at = self.arena[page, position // ratio % fill.page_entries]
                    assert at == position, f"{spec.name}: page {page} holds position {at}, expected {position}"
                    value = mix(value, token)
        return mix(value, tokens[query[-1]])

    def _advance_state(self, plan: BatchPlan, row: int, group: Any, tokens: list[int]) -> int:
        source, target = group.input_pages[row], group.output_pages[row]
        state, done = 5, 0
        if not plan.row_flags[row] & RowFlag.FRESH_STATE:
            state, done = self.arena[source[0], 0]
            assert all((self.arena[page, 0] == self.arena[source[0], 0]).all() for page in source)
        assert done == plan.seq_lens[row] - len(tokens), "state belongs to another position"
        for token in tokens:
            state = mix(int(state), token)
        self.arena[target, 0] = (state, plan.seq_lens[row])
        return int(state)


class OverlapFake(PagedFake):
    """The same with dispatch and collect; results appear only when collected."""

    def dispatch(self, plan: BatchPlan) -> ForwardOutput:
        self._maybe_fail("dispatch")
        return self._execute(plan)

    def collect(self, handle: ForwardOutput) -> ForwardOutput:
        self._maybe_fail("collect")
        return replace(handle)
