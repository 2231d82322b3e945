"""Where each column of a plan lies in its one packed int32 buffer.

The planner writes the columns through NumPy views, the runtime slices the same buffer inside the compiled
program, and plan recordings store the buffer as it is. Float columns travel bit-cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from resin.plan.buckets import Bucket
from resin.plan.cache import CacheGeometry, CacheGroup, StateGroup
from resin.plan.sampling import SAMPLING_COLUMNS


@dataclass(frozen=True, slots=True)
class Column:
    """One named array of the buffer: `[length]` of "int32" or "float32", starting at `offset` words."""

    name: str
    offset: int
    length: int
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class PlanLayout:
    """The columns of one bucket's buffer and its size in 32-bit words."""

    columns: tuple[Column, ...]
    words: int
    by_name: Mapping[str, Column]

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """View of one column of an int32 `[words]` buffer."""
        column = self.by_name[name]
        part = buffer[column.offset : column.offset + column.length]
        return part if column.dtype == "int32" else part.view(np.float32)

    def kept(self, buffer: np.ndarray) -> np.ndarray:
        """int32 `[KEPT_COLUMNS, B]` view of an int32 `[words]` buffer."""
        first = self.by_name[KEPT_COLUMNS[0]]
        return buffer[first.offset : first.offset + len(KEPT_COLUMNS) * first.length].reshape(-1, first.length)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Views of every column of an int32 `[words]` buffer, by name."""
        return {name: self.view(buffer, name) for name in self.by_name}


class Header(NamedTuple):
    """The first words of a plan's buffer.

    Attributes:
        num_sequences, num_tokens: up to the last live one.
        any_flags: union of all rows' flags.
        top_logprobs: most likely tokens to report, the largest of all rows.
    """

    num_sequences: int
    num_tokens: int
    any_flags: int
    top_logprobs: int


HEADER = Header(*range(len(Header._fields)))  # where each word lies

SAMPLING_INTS, SEQUENCE_FLOATS = (
    tuple(column.name for column in SAMPLING_COLUMNS if column.dtype == dtype) for dtype in ("int32", "float32")
)
SEQUENCE_INTS = ("computed", "slots", "row_flags", *SAMPLING_INTS, "next_token")
# What a sequence keeps from one decode step to the next; these columns lie side by side (`PlanLayout.kept`).
KEPT_COLUMNS = (*SEQUENCE_INTS[1:], *SEQUENCE_FLOATS)

PAGED_COLUMNS = ("page_indptr", "page_ids", "first_position")


def plan_layout(bucket: Bucket, groups: Sequence[CacheGroup], geometry: CacheGeometry) -> PlanLayout:
    """The layout of a bucket's buffer for a model's cache groups.

    Columns: `header`; per token `token_ids`; per sequence `query_indptr` (B+1), the integer and the float columns and,
    in decode buckets of width above 1, `drafts`; per History or Window group g `page_indptr:g` (B+1),
    `first_position:g` (B); per State group `input_pages:g`, `output_pages:g` (B * pages); and last, as by far the
    longest, `page_ids:g` of every History or Window group.
    Positions, lengths and where each new entry goes follow from these (`resin/runtime/places.py`).
    """
    return _plan_layout(bucket, tuple(groups), geometry)


@lru_cache(maxsize=1024)
def _plan_layout(bucket: Bucket, groups: tuple[CacheGroup, ...], geometry: CacheGeometry) -> PlanLayout:
    columns: list[Column] = []
    words = 0

    def add(name: str, length: int, dtype: str = "int32") -> None:
        nonlocal words
        columns.append(Column(name, words, length, dtype))
        words += length

    sequences, tokens = bucket.sequences, bucket.tokens
    pairs = list(zip(groups, geometry.groups, bucket.row_pages, strict=True))
    paged = [(group.name, row_pages) for group, _, row_pages in pairs if not isinstance(group, StateGroup)]
    add("header", len(HEADER))
    add("token_ids", tokens)
    add("query_indptr", sequences + 1)
    for name in SEQUENCE_INTS:
        add(name, sequences)
    for name in SEQUENCE_FLOATS:
        add(name, sequences, "float32")
    if bucket.width > 1:
        add("drafts", sequences)
    for group, fill, _ in pairs:
        if isinstance(group, StateGroup):
            add(f"input_pages:{group.name}", sequences * fill.pages_per_state)
            add(f"output_pages:{group.name}", sequences * fill.pages_per_state)
        else:
            add(f"page_indptr:{group.name}", sequences + 1)
            add(f"first_position:{group.name}", sequences)
    for name, row_pages in paged:
        add(f"page_ids:{name}", row_pages)
    return PlanLayout(tuple(columns), words, {column.name: column for column in columns})
