"""A planned step on its way through the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resin.plan import BatchPlan
from resin.sched.cache import Reservation
from resin.sched.planner import Chunk
from resin.sched.request import Request
from resin.sched.rows import LiveRows


@dataclass(slots=True)
class PlannedStep:
    """A plan with what is needed to undo or commit it."""

    plan: BatchPlan
    reservation: Reservation
    slots: slice | np.ndarray  # of the rows, an index into the columns of the SlotTable
    requests: Sequence[Request]
    chunks: list[Chunk] | None  # prefill only
    rows: LiveRows | None  # decode only
    ending: Sequence[int] = ()  # rows that get the last token that they may have (decode only)
