"""Buckets: the compiled shapes that plans are padded to."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Phase(enum.IntEnum):
    """A plan is all prefill or all decode."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, slots=True)
class Bucket:
    """One compiled shape.

    Attributes:
        phase: prefill or decode.
        sequences: padded sequences B.
        tokens: padded tokens T; in decode `width` for each sequence.
        row_pages: page-row capacity of each cache group over the whole plan, in pages.
        width: token places of a sequence in a decode plan, its latest token and drafts that may follow it; otherwise 1.
    """

    phase: Phase
    sequences: int
    tokens: int
    row_pages: tuple[int, ...]
    width: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", self.tokens // self.sequences if self.phase is Phase.DECODE else 1)

    def holds(self, sequences: int, tokens: int, row_pages: Sequence[int]) -> bool:
        """True if a plan of these live counts fits."""
        return (
            sequences <= self.sequences
            and tokens <= self.tokens
            and all([need <= room for need, room in zip(row_pages, self.row_pages, strict=True)])
        )

    def __str__(self) -> str:
        pages = "+".join(str(count) for count in self.row_pages) or "0"
        return f"{self.phase.name.lower()} {self.sequences}x{self.tokens} ({pages} pages)"


def smallest_bucket(
    buckets: Sequence[Bucket], phase: Phase, sequences: int, tokens: int, row_pages: Sequence[int], *, width: int = 1
) -> Bucket | None:
    """The first bucket of the phase and width that holds the counts, in table order; None if no bucket does.

    An empty table stands for a runner without compiled shapes: the plan keeps its exact size.
    """
    if not buckets:
        return Bucket(phase, sequences, tokens, tuple(row_pages))
    for bucket in buckets:
        if bucket.phase is phase and bucket.width == width and bucket.holds(sequences, tokens, row_pages):
            return bucket
    return None
