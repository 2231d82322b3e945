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
    draft_tokens: int = 0,
) -> RunnerConfig:
    """A table of a few buckets, unless another is given. `spans` are tokens a page of each group (0 for a State)
    instead of those that `plan_geometry` picks: the widths of a real model's layers make such pages, Gemma 3 1B ones of
    88 and 16 tokens."""
    groups = tuple(
        replace(group, copies=1 + draft_tokens) if isinstance(group, StateGroup) else group for group in groups
    )
    if spans:
        geometry = geometry_of_spans(groups, spans)
    else:
        geometry = plan_geometry(groups, arena_dtype="float32", page_tokens=page_tokens if groups else None)
    spans = [fill.span_tokens for fill in geometry.groups]

    def bucket(phase: Phase, sequences: int, tokens: int) -> Bucket:
        rows = [sequences * (-(-max_context_tokens // span) + 1) if span else 0 for span in spans]
        return Bucket(phase, sequences, tokens, tuple(rows))

    usual = [bucket(Phase.PREFILL, min(tokens, max_sequences), tokens) for tokens in (8, max_plan_tokens)]
    widths, sizes = sorted({1, 1 + draft_tokens}), sorted({1, max_sequences})
    usual += [bucket(Phase.DECODE, sequences, sequences * width) for width in widths for sequences in sizes]
    return RunnerConfig(
        vocab_size=VOCAB,
        max_sequences=max_sequences,
        max_context_tokens=max_context_tokens,
        max_plan_tokens=max_plan_tokens,
        groups=groups,
        geometry=geometry,
        buckets=tuple(table or usual) if buckets else (),
        draft_tokens=draft_tokens,
    )


def geometry_of_spans(groups: Sequence[CacheGroup], spans: Sequence[int]) -> CacheGeometry:
    align = math.lcm(*(span for span in spans if span))
    checkpoints = [group.checkpoint_tokens for group in groups if isinstance(group, StateGroup)]
    copies = [group.copies if isinstance(group, StateGroup) else 0 for group in groups]
    fills = tuple(GroupGeometry(max(span, 1), span, state, 0.0) for span, state in zip(spans, copies, strict=True))
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
        guess: drafts of a sequence from its true continuation, where the config has drafts.
    """

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config
        self.fail: dict[str, BaseException] = {}
        self.plans: list[BatchPlan] = []
        self.check: Callable[[BatchPlan], None] = lambda plan: None
        self.faults: dict[int, tuple[int, RowFault]] = {}
        self.guess: Callable[[list[int]], list[int]] = lambda tokens: tokens
        # Last token, length, and which copy of a State is true.
        self.slots = np.full((config.max_sequences + 1, 3), _POISON, np.int64)
        self.drafts: list[list[int]] = [[] for _ in range(config.max_sequences + 1)]
        self.known: list[list[int]] = [[] for _ in range(config.max_sequences + 1)]  # tokens of each slot's sequence

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
        for load in plan.slot_loads:
            self.known[load.slot] = load.token_ids.tolist()
        emitted, indptr, reports = [], [0], []
        for row in range(plan.num_sequences):
            tokens, report = ([], (0, 0, 0)) if self._is_padding(plan, row) else self._run_row(plan, row)
            emitted += tokens
            indptr.append(len(emitted))
            reports.append(report)
        dtype = np.int32 if self.faults else np.uint32
        drafting = np.array(reports, np.int32).reshape(-1, 3) if self.config.draft_tokens else None
        return ForwardOutput(np.asarray(emitted, dtype), np.asarray(indptr, np.uint32), drafting=drafting)

    def _run_row(self, plan: BatchPlan, row: int) -> tuple[list[int], tuple[int, int, int]]:
        """The tokens that a row emits, and its DraftReport."""
        slot, first, start = int(plan.slots[row]), int(plan.query_indptr[row]), int(plan.computed[row])
        if plan.phase is Phase.DECODE:
            latest = int(plan.token_ids[first])
            if plan.row_flags[row] & RowFlag.FROM_SLOT:
                latest, length, _ = self.slots[slot].tolist()
                assert length == start or (self.config.draft_tokens and length < start), "an unknown length"
                start = length
            else:
                assert start == self.slots[slot, 1] and latest == self.slots[slot, 0]
            query = [latest, *self.drafts[slot][: int(plan.drafts[row])]]
        else:
            query = plan.token_ids[first : int(plan.query_indptr[row + 1])].tolist()
        self._append(plan, row, start, query)
        decodes = plan.phase is Phase.DECODE
        copy = int(self.slots[slot, 2]) if decodes else 0
        ends = range(1, len(query) + 1) if decodes else [len(query)]
        values = [self._row_value(plan, row, start, query[:end], copy, end - 1 if decodes else 0) for end in ends]
        drawn = [value % VOCAB for value in values]
        at, fault = self.faults.get(plan.request_ids[row], (-1, None))
        if fault is not None:
            drawn = [token if start + end < at else int(fault) for token, end in zip(drawn, ends, strict=True)]
        kept = 0
        while kept < len(drawn) - 1 and query[kept + 1] == drawn[kept]:
            kept += 1
        self.slots[slot] = drawn[kept], start + ends[kept], kept
        if not plan.row_flags[row] & RowFlag.EMIT:
            return [], (0, 0, 0)
        tokens, tried = drawn[: kept + 1], len(query) - 1 if decodes else 0
        agreed = kept
        if decodes and plan.bucket.width == 1 and self.drafts[slot]:
            tried, agreed = 1, int(self.drafts[slot][0] == drawn[0])
        self._draft(slot, tokens)
        return tokens, (tried, agreed, len(self.drafts[slot]))

    def _draft(self, slot: int, tokens: list[int]) -> None:
        """Guesses again, from the sequence with its new tokens."""
        if not self.config.draft_tokens:
            return
        self.known[slot] += tokens
        if min(tokens) >= 0:
            truth = expected_tokens(self.config, self.known[slot], self.config.draft_tokens)
            self.drafts[slot] = self.guess(truth)

    def _check_padding(self, plan: BatchPlan) -> None:
        assert not plan.buffer.flags.writeable and not plan.token_ids.flags.writeable
        assert plan.num_sequences <= plan.bucket.sequences and plan.num_tokens <= plan.bucket.tokens
        assert (plan.row_flags[plan.num_sequences :] == 0).all()
        assert (plan.slots[plan.num_sequences :] == self.config.max_sequences).all()
        assert (plan.query_indptr[plan.num_sequences :] == plan.num_tokens).all()
        assert not plan.drafts[plan.num_sequences :].any() and (plan.drafts < plan.bucket.width).all()

    def _is_padding(self, plan: BatchPlan, row: int) -> bool:
        """True for an empty place between the rows of a decode plan, which must read and write nothing of anybody's."""
        if plan.slots[row] != self.config.max_sequences:
            return False
        assert plan.phase is Phase.DECODE and row < plan.num_sequences - 1 and plan.request_ids[row] == -1
        assert not plan.computed[row] and not plan.row_flags[row] and not plan.drafts[row]
        assert not plan.token_ids[plan.query_indptr[row] : plan.query_indptr[row + 1]].any()
        for group in plan.groups:
            if group.page_indptr is not None and group.first_position is not None:
                assert group.page_indptr[row] == group.page_indptr[row + 1] and not group.first_position[row]
            elif group.input_pages is not None and group.output_pages is not None:
                assert not group.input_pages[row].any() and not group.output_pages[row].any()
        return True

    def _append(self, plan: BatchPlan, row: int, start: int, query: list[int]) -> None:
        for spec, fill, group in zip(self.config.groups, self.config.geometry.groups, plan.groups, strict=True):
            if isinstance(spec, StateGroup):
                continue
            pages, origin = self._pages(group, row)
            for position, token in enumerate(query, start):
                if (position + 1) % spec.tokens_per_entry == 0:
                    page = pages[(position - origin) // fill.span_tokens]
                    self.arena[page, position // spec.tokens_per_entry % fill.page_entries] = token, position

    @staticmethod
    def _pages(group: Any, row: int) -> tuple[np.ndarray, int]:
        """The row's pages of a History or Window group, and the position at which they start."""
        pages = group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]]
        return pages, int(group.first_position[row])

    def _row_value(self, plan: BatchPlan, row: int, start: int, query: list[int], copy: int, left: int) -> int:
        """What the sequence's entries say once these tokens are among them.

        Args:
            copy: of the States, true before the plan.
            left: that the state after these tokens is left in.
        """
        value, length = 1, start + len(query)
        assert query
        for spec, fill, group in zip(self.config.groups, self.config.geometry.groups, plan.groups, strict=True):
            if isinstance(spec, StateGroup):
                value = mix(value, self._advance_state(plan, row, group, start, query, copy, left))
                continue
            pages, origin = self._pages(group, row)
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
        return mix(value, query[-1])

    def _advance_state(
        self, plan: BatchPlan, row: int, group: Any, start: int, tokens: list[int], copy: int, left: int
    ) -> int:
        copies = 1 + self.config.draft_tokens
        source, target = (side[row].reshape(copies, -1) for side in (group.input_pages, group.output_pages))
        state, done = 5, 0
        if left:  # the one before is the state after the tokens but the last
            source, copy, tokens, start = target, left - 1, tokens[-1:], start + len(tokens) - 1
        if left or not plan.row_flags[row] & RowFlag.FRESH_STATE:
            state, done = self.arena[source[copy, 0], 0]
            assert all((self.arena[page, 0] == self.arena[source[copy, 0], 0]).all() for page in source[copy])
        assert done == start, "state belongs to another position"
        for token in tokens:
            state = mix(int(state), token)
        self.arena[target[left], 0] = (state, start + len(tokens))
        return int(state)


class OverlapFake(PagedFake):
    """The same with dispatch and collect; results appear only when collected."""

    def dispatch(self, plan: BatchPlan) -> ForwardOutput:
        self._maybe_fail("dispatch")
        return self._execute(plan)

    def collect(self, handle: ForwardOutput) -> ForwardOutput:
        self._maybe_fail("collect")
        return replace(handle)
