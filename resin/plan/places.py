"""Positions, lengths and destinations of a plan's tokens on the host: what `resin/runtime/places.py` derives on the
device, for tests, recordings and runners without a device. A step that runs needs none of it."""

from __future__ import annotations

import numpy as np

from resin.plan.buckets import Phase
from resin.plan.cache import GroupGeometry, HistoryGroup, WindowGroup


def sequence_lengths(phase: Phase, computed: np.ndarray, query_indptr: np.ndarray) -> np.ndarray:
    """int32 [B], tokens of each sequence after the step."""
    lengths: np.ndarray = computed + np.diff(query_indptr)
    if phase is Phase.DECODE:
        lengths[computed == 0] = 0  # an empty place has a padded token
    return lengths


def token_positions(tokens: int, computed: np.ndarray, query_indptr: np.ndarray) -> np.ndarray:
    """int32 [T], place of each token in its sequence; 0 for padding."""
    positions = np.zeros(tokens, np.int32)
    for row, start in enumerate(computed.tolist()):
        first, stop = query_indptr[row : row + 2].tolist()
        positions[first:stop] = np.arange(start, start + stop - first)
    return positions


def append_places(
    spec: HistoryGroup | WindowGroup,
    fill: GroupGeometry,
    pages: tuple[np.ndarray, np.ndarray, np.ndarray],
    query_indptr: np.ndarray,
    lengths: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T] pages and offsets of the entries that the tokens complete in a group; 0 for the others.

    Args:
        pages: the group's `page_indptr`, `page_ids` and `first_position`.
    """
    page_indptr, page_ids, firsts = pages
    found, offsets = np.zeros((2, len(positions)), np.int32)
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        part = slice(*query_indptr[row : row + 2].tolist())
        held, at = page_ids[page_indptr[row] : page_indptr[row + 1]], positions[part]
        complete = (at + 1) % spec.tokens_per_entry == 0
        found[part] = np.where(complete, held[(at - firsts[row]) // fill.span_tokens], 0)
        offsets[part] = np.where(complete, at // spec.tokens_per_entry % fill.page_entries, 0)
    return found, offsets
