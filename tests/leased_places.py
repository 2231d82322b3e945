"""Where a plan's tokens stand and go, from the slot table and the leases alone: the plan has no say."""

from __future__ import annotations

from typing import NamedTuple

from resin import BatchPlan, Engine, StateGroup
from resin.plan import NOBODY


class LeasedPlaces(NamedTuple):
    """Of one plan, padding included.

    Attributes:
        positions: [T].
        lengths: [B], tokens of each sequence after the plan.
        destinations: for each History and Window group the pages and offsets [T] of the entries that tokens complete.
    """

    positions: list[int]
    lengths: list[int]
    destinations: dict[str, tuple[list[int], list[int]]]


def leased_places(engine: Engine, plan: BatchPlan) -> LeasedPlaces:
    """The places of a plan that the engine's scheduler has accepted, and none after it."""
    scheduler, bucket = engine.scheduler, plan.bucket
    rows = {request.id: request for request in scheduler.running()}
    groups = [pair for pair in plan.group_specs if not isinstance(pair[0], StateGroup)]
    positions, lengths = [0] * bucket.tokens, [0] * bucket.sequences
    destinations = {spec.name: ([0] * bucket.tokens, [0] * bucket.tokens) for spec, _ in groups}
    for row, request_id in enumerate(plan.request_ids):
        if request_id == NOBODY:
            continue
        request = rows[request_id]
        assert request.lease is not None
        first, stop = plan.query_indptr[row : row + 2].tolist()
        lengths[row] = int(scheduler.replicas[0].table.computed[request.slot])
        for token in range(first, stop):
            positions[token] = position = lengths[row] - (stop - token)
            for (spec, fill), held in zip(groups, request.lease.rows, strict=True):
                if (position + 1) % spec.tokens_per_entry == 0:
                    pages, offsets = destinations[spec.name]
                    pages[token] = held.at(position // fill.span_tokens)
                    offsets[token] = position % fill.span_tokens // spec.tokens_per_entry
    return LeasedPlaces(positions, lengths, destinations)
