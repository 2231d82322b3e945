"""When drafts pay: a step that checks them costs more than one that does not, and brings more tokens if they hold."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from resin.plan import RunnerConfig
from resin.plan.output import DRAFT_REPORT
from resin.sched.rows import DecodeRows
from resin.sched.slots import SlotTable

# What a step with drafts must bring beyond its price: estimates are a step or more behind.
MARGIN = 1.03
# Weight of one checked draft in a row's rate.
NEWEST = 0.25


class DraftPolicy:
    """Chooses between the two widths of decode plans by what rows' drafts were worth lately.

    Attributes:
        costs: time of a step with drafts over that of one without, by rows of the bucket; what was not measured costs
            nothing more.
        tried, agreed: int64 [draft_tokens], drafts that plans have checked, and those that held, by their place behind
            the row's latest token.
    """

    def __init__(self, config: RunnerConfig) -> None:
        self.costs: Mapping[int, float] = {}
        self.tried, self.agreed = np.zeros((2, config.draft_tokens), np.int64)
        self._most = config.draft_tokens
        self._sizes = sorted(bucket.sequences for bucket in config.buckets if bucket.width > 1)

    def pay(self, rows: DecodeRows, width: int) -> bool:
        """Whether the rows' next plan should check drafts."""
        if not self._most or (self._sizes and rows.count > self._sizes[-1]):
            return False
        table, live = rows.table, rows.live()
        ready = np.minimum(table.ready[live.slots], width - 1)
        rate = np.minimum(table.draft_rate[live.slots], 0.999)
        gained = (rate * (1 - rate**ready) / (1 - rate)).sum()  # a draft counts if all before it are right
        size = next((size for size in self._sizes if size >= rows.count), rows.count)
        cost = self.costs.get(size, 1.0)
        return bool(gained > 0 and len(live) + gained > len(live) * cost * (MARGIN if cost > 1 else 1))

    def note(self, table: SlotTable, slots: np.ndarray, reports: np.ndarray, *, width: int) -> None:
        """What a plan found out of its rows' drafts.

        Args:
            table: of the slots.
            slots: int32 [n].
            reports: int32 [n, 3], a DraftReport of each.
            width: of the plan; one without places for drafts has compared a first one all the same.
        """
        tried, agreed, ready = (reports[:, field] for field in DRAFT_REPORT)
        if width > 1:
            places = np.arange(self._most)[:, None]
            self.tried += (places < tried).sum(axis=1)
            self.agreed += (places < agreed).sum(axis=1)
        checked = agreed + (agreed < tried)  # what comes after a wrong draft says nothing
        weight = 1 - (1 - NEWEST) ** checked
        rate = table.draft_rate[slots]
        table.draft_rate[slots] = rate + weight * (agreed / np.maximum(checked, 1) - rate)
        table.ready[slots] = ready
