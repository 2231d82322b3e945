"""BatchPlan: one step of work, frozen and padded to its bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resin.plan.buckets import Bucket, Phase
from resin.plan.cache import CacheGroup, GroupGeometry, StateGroup
from resin.plan.config import RunnerConfig
from resin.plan.flags import SPECIAL, RowFlag
from resin.plan.layout import HEADER, PAGED_COLUMNS, Header, PlanLayout, plan_layout
from resin.plan.places import append_places, token_positions
from resin.plan.sampling import SAMPLING_COLUMNS

NOBODY = -1  # the request of an empty place


_LOGPROBS, _MASK = int(RowFlag.LOGPROBS), int(RowFlag.MASK)  # arithmetic with the flags themselves is slow


@dataclass(frozen=True, slots=True, eq=False)
class CacheGroupPlan:
    """One cache group's page rows; which fields are set depends on the kind of group.

    History and Window: `page_ids` holds the rows of all sequences one after another in chronological order,
    sequence b from `page_indptr[b]` to `page_indptr[b + 1]`; its first page starts at `first_position[b]`. A token's
    position and its row say where its entry goes (`BatchPlan.append_places`).
    State: `input_pages` and `output_pages`, `pages_per_state` ids a sequence. Equal rows update in place.
    """

    name: str
    page_indptr: np.ndarray | None = None  # int32 [B + 1]
    page_ids: np.ndarray | None = None  # int32 [row_pages]
    first_position: np.ndarray | None = None  # int32 [B]
    input_pages: np.ndarray | None = None  # int32 [B, pages_per_state]
    output_pages: np.ndarray | None = None  # int32 [B, pages_per_state]


@dataclass(frozen=True, slots=True, eq=False)
class SlotLoad:
    """Per-request state that a device slot needs before the plan runs: rare (penalties, bias, min tokens), unless the
    runner drafts from what came before.

    Attributes:
        slot: which slot; whatever it held is replaced.
        count_row: of the device's token counts, the row that is this sequence's while it runs; for a sequence without
            penalties the scratch row `config.count_rows`, which nobody reads.
        token_ids: int32, every token of the sequence so far, the plan's own row included, prompt first. The runner sets
            the token counts from these alone; afterwards it counts only the tokens that it emits.
        prompt_tokens: how many of them are prompt; later ones count as output.
        bias_ids, bias_values: int32 and float32, the request's logit bias.
        stop_ids: int32 ids that `SUPPRESS_STOP` forbids.
    """

    slot: int
    count_row: int
    token_ids: np.ndarray
    prompt_tokens: int
    bias_ids: np.ndarray
    bias_values: np.ndarray
    stop_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One phase-homogeneous step. Every array is a read-only view of `buffer`, padded to the bucket.

    Padded sequences have no tokens, slot `max_sequences` (scratch) and no flags; padded tokens have id 0, position 0
    and append to page 0, which is scratch. In a decode plan sequence b is place b and owns `bucket.width` tokens, of
    which its latest one and `drafts[b]` more are live at most; an empty place between others is padding as well, of
    padded tokens, length 0 and no pages.

    Attributes:
        step: number of the plan, from 0.
        bucket: the compiled shape, B sequences and T tokens.
        num_sequences, num_tokens: up to the last live one.
        buffer: int32 [layout.words], all columns in one piece.
        layout: where each column lies.
        group_specs: the runner's cache groups with their geometry.
        slot_loads: slots to prepare before the plan runs.
        allowed_masks: int32 [m, ceil(vocab / 32)] bit sets of the m rows that have MASK, one after another; None if
            none has.
        request_ids: of the rows, NOBODY where a place is empty; for people and recordings.
    """

    step: int
    bucket: Bucket
    num_sequences: int
    num_tokens: int
    buffer: np.ndarray
    layout: PlanLayout
    group_specs: tuple[tuple[CacheGroup, GroupGeometry], ...]
    slot_loads: tuple[SlotLoad, ...] = ()
    allowed_masks: np.ndarray | None = None
    request_ids: tuple[int, ...] = ()

    @property
    def phase(self) -> Phase:
        return self.bucket.phase

    @property
    def header(self) -> Header:
        """Counts, the union of the flags, and how many logprobs."""
        return Header(*self.buffer[: len(HEADER)].tolist())

    def column(self, name: str) -> np.ndarray:
        """One column of the buffer by its layout name (`plan_layout` lists them)."""
        return self.layout.view(self.buffer, name)

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [T]; 0 where the row takes its token from its slot."""
        return self.column("token_ids")

    @property
    def query_indptr(self) -> np.ndarray:
        """int32 [B + 1], sequence b owns tokens `query_indptr[b]:query_indptr[b + 1]`."""
        return self.column("query_indptr")

    @property
    def computed(self) -> np.ndarray:
        """int32 [B], tokens of the sequence before this step, as the host knows them; at least 1 in a decode plan but
        at empty places."""
        return self.column("computed")

    @property
    def drafts(self) -> np.ndarray:
        """int32 [B], most tokens after the row's latest one that the row may try; in a decode plan of width 1 none."""
        if self.bucket.width == 1:
            return np.zeros(self.bucket.sequences, np.int32)
        return self.column("drafts")

    @property
    def live_tokens(self) -> np.ndarray:
        """int32 [B], tokens of each sequence that are not padding, drafts that there may be included; derived."""
        if self.phase is Phase.DECODE:
            return np.where(self.computed > 0, 1 + self.drafts, 0).astype(np.int32)
        return np.diff(self.query_indptr)

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 [B], tokens of the sequence after this step, as the host knows them, at most; derived."""
        return self.computed + self.live_tokens

    @property
    def positions(self) -> np.ndarray:
        """int32 [T], place of each token in its sequence; derived."""
        return token_positions(self.bucket.tokens, self.computed, self.query_indptr, self.live_tokens)

    def append_places(self, group: str) -> tuple[np.ndarray, np.ndarray]:
        """int32 [T] pages and offsets where a History or Window group keeps each token's entry; derived.

        Page 0 takes what belongs nowhere: padding, and tokens that complete no entry.
        """
        spec, fill = next(pair for pair in self.group_specs if pair[0].name == group)
        assert not isinstance(spec, StateGroup)
        indptr, ids, firsts = (self.column(f"{field}:{group}") for field in PAGED_COLUMNS)
        return append_places(spec, fill, (indptr, ids, firsts), self.query_indptr, self.live_tokens, self.positions)

    @property
    def slots(self) -> np.ndarray:
        """int32 [B], row of the device slot table."""
        return self.column("slots")

    @property
    def row_flags(self) -> np.ndarray:
        """int32 [B], RowFlag bits."""
        return self.column("row_flags")

    @property
    def next_token(self) -> np.ndarray:
        """int32 [B], known token that follows the row's last one (for PROMPT_LOGPROBS), -1 if none."""
        return self.column("next_token")

    @property
    def sampling(self) -> dict[str, np.ndarray]:
        """The SAMPLING_COLUMNS by name, each [B]."""
        return {column.name: self.column(column.name) for column in SAMPLING_COLUMNS}

    @property
    def top_logprobs(self) -> int:
        """Most likely tokens to report, the largest of all rows."""
        return int(self.buffer[HEADER.top_logprobs])

    @property
    def groups(self) -> tuple[CacheGroupPlan, ...]:
        """Page rows, in the order of the runner's groups."""
        plans = []
        for group, fill in self.group_specs:
            name = group.name
            if isinstance(group, StateGroup):
                shape = (self.bucket.sequences, fill.pages_per_state)
                pages = [self.column(f"{side}_pages:{name}").reshape(shape) for side in ("input", "output")]
                plans.append(CacheGroupPlan(name, input_pages=pages[0], output_pages=pages[1]))
            else:
                plans.append(CacheGroupPlan(name, *(self.column(f"{field}:{name}") for field in PAGED_COLUMNS)))
        return tuple(plans)

    @property
    def masked_rows(self) -> np.ndarray:
        """int [m], the rows of `allowed_masks`."""
        return np.flatnonzero(self.row_flags & _MASK)

    @property
    def num_special(self) -> int:
        """Rows whose logits are changed before the draw or reported after it."""
        if not self.buffer[HEADER.any_flags] & SPECIAL:
            return 0
        return int(np.count_nonzero(self.row_flags[: self.num_sequences] & SPECIAL))

    @property
    def emits(self) -> np.ndarray:
        """bool [num_sequences]: rows that produce tokens."""
        return (self.row_flags[: self.num_sequences] & RowFlag.EMIT) != 0

    @property
    def wants_logprobs(self) -> bool:
        """True if a row asks for the logprobs of its sampled token."""
        return bool(self.buffer[HEADER.any_flags] & _LOGPROBS)


def build_plan(
    config: RunnerConfig,
    bucket: Bucket,
    buffer: np.ndarray,
    *,
    step: int,
    slot_loads: tuple[SlotLoad, ...] = (),
    allowed_masks: np.ndarray | None = None,
    request_ids: tuple[int, ...] = (),
) -> BatchPlan:
    """Freezes a filled int32 `[plan_layout(...).words]` buffer into a plan; its header holds the live counts."""
    buffer.flags.writeable = False
    layout = plan_layout(bucket, config.groups, config.geometry)
    sequences, tokens = layout.view(buffer, "header")[:2].tolist()
    specs = tuple(zip(config.groups, config.geometry.groups, strict=True))
    return BatchPlan(step, bucket, sequences, tokens, buffer, layout, specs, slot_loads, allowed_masks, request_ids)


def empty_plan(config: RunnerConfig, bucket: Bucket, step: int = 0) -> BatchPlan:
    """A plan without rows: every place is padding, and what it writes goes to the scratch page and slot."""
    layout = plan_layout(bucket, config.groups, config.geometry)
    buffer = np.zeros(layout.words, np.int32)
    layout.view(buffer, "slots")[:] = config.max_sequences
    layout.view(buffer, "next_token")[:] = -1
    return build_plan(config, bucket, buffer, step=step)
