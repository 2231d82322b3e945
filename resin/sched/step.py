"""A step on its way through the transaction: what each replica reserved, and the plans made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from resin.plan import Bucket, Phase, StepPlan, smallest_bucket
from resin.sched.cache import Reservation
from resin.sched.planner import Chunk
from resin.sched.request import Request
from resin.sched.rows import LiveRows


class Demand(NamedTuple):
    """Which phases have something to run."""

    prefill: bool
    decode: bool


class Needs(NamedTuple):
    """What a bucket must hold: places, tokens, and pages in the rows of each cache group; in decode each place has
    `width` tokens."""

    sequences: int
    tokens: int
    row_pages: tuple[int, ...]
    width: int = 1

    def union(self, other: Needs) -> Needs:
        """What a bucket must hold to hold either."""
        pages = tuple(max(pair) for pair in zip(self.row_pages, other.row_pages, strict=True))
        sequences, width = max(self.sequences, other.sequences), max(self.width, other.width)
        return Needs(sequences, max(self.tokens, other.tokens, sequences * width), pages, width)

    def smallest(self, buckets: Sequence[Bucket], phase: Phase) -> Bucket | None:
        """The bucket of the width, if there is one."""
        return smallest_bucket(buckets, phase, self.sequences, self.tokens, self.row_pages, width=self.width)


@dataclass(slots=True)
class PrefillPart:
    """Chunks with their pages, before they are a plan.

    Attributes:
        bucket: the one that the replica alone would run.
        reservation: what was taken for it.
        slots: int32 [n], of the chunks.
    """

    bucket: Bucket
    needs: Needs
    reservation: Reservation
    chunks: list[Chunk]
    slots: np.ndarray

    @property
    def requests(self) -> Sequence[Request]:
        return [chunk.request for chunk in self.chunks]


@dataclass(slots=True)
class DecodePart:
    """The next token of every live row with its pages, before it is a plan.

    Attributes:
        bucket: the one that the replica alone would run.
        reservation: what was taken for it.
        growing: for each paged group the places that start a page.
        sealing: places whose state so far becomes a checkpoint.
        ending: rows that get the last token that they may have.
        drafts: int32 [places], how many drafts each row may try; None for none.
    """

    bucket: Bucket
    needs: Needs
    reservation: Reservation
    rows: LiveRows
    growing: list[list[int]]
    sealing: list[int]
    ending: list[int]
    drafts: np.ndarray | None = None

    @property
    def requests(self) -> Sequence[Request]:
        return self.rows.requests

    @property
    def drafts_of_rows(self) -> np.ndarray:
        """int32 [rows]: `drafts` without empty places."""
        if self.drafts is None:
            return np.zeros(len(self.rows), np.int32)
        return self.drafts if self.rows.emits is None else self.drafts[self.rows.emits]


Part = PrefillPart | DecodePart


class PlannedStep(NamedTuple):
    """A step's plans, with what is needed to undo or commit them.

    Attributes:
        parts: what each replica's plan was made of; None where it is empty.
    """

    plan: StepPlan
    parts: tuple[Part | None, ...]
