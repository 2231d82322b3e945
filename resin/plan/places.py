"""Positions, lengths and destinations of a plan's tokens on the host: what `resin/runtime/places.py` derives on the
device, for tests, recordings and runners without a device. A step that runs needs none of it."""

from __future__ import annotations

import numpy as np

from resin.plan.cache import GroupGeometry, HistoryGroup, WindowGroup


def token_positions(tokens: int, computed: np.ndarray, query_indptr: np.ndarray, live: np.ndarray) -> np.ndarray:
    """int32 [T], place of each token in its sequence; 0 for padding. `live` [B] tokens of each sequence are none."""
    positions = np.zeros(tokens, np.int32)
    for first, start, count in zip(query_indptr.tolist(), computed.tolist(), live.tolist(), strict=False):
        positions[first : first + count] = np.arange(start, start + count)
    return positions


def append_places(
    spec: HistoryGroup | WindowGroup,
    fill: GroupGeometry,
    pages: tuple[np.ndarray, np.ndarray, np.ndarray],
    query_indptr: np.ndarray,
    live: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T] pages and offsets of the entries that the tokens complete in a group; 0 for the others.

    Args:
        pages: the group's `page_indptr`, `page_ids` and `first_position`.
        live: tokens of each sequence that are not padding.
    """
    page_indptr, page_ids, firsts = pages
    found, offsets = np.zeros((2, len(positions)), np.int32)
    for row, count in enumerate(live.tolist()):
        if not count:
            continue
        part = slice(int(query_indptr[row]), int(query_indptr[row]) + count)
        held, at = page_ids[page_indptr[row] : page_indptr[row + 1]], positions[part]
        complete = (at + 1) % spec.tokens_per_entry == 0
        found[part] = np.where(complete, held[(at - firsts[row]) // fill.span_tokens], 0)
        offsets[part] = np.where(complete, at // spec.tokens_per_entry % fill.page_entries, 0)
    return found, offsets
