"""The scripted runner with its tokens in pages, so that prefixes can be found in the cache."""

from __future__ import annotations

import dataclasses

import numpy as np

from resin import ArenaSpec, BatchPlan, HistoryGroup, Phase, Plane, RowFlag, plan_geometry
from tests.serve.scripted_runner import ScriptedRunner

PAGE_TOKENS = 16


class PagedScriptedRunner(ScriptedRunner):
    """Reads what stands before a plan's tokens through the plan's page rows, as a real runner reads keys and values."""

    def __init__(self, *, default: str = "Hello!", step_s: float = 0.0) -> None:
        super().__init__(default=default, step_s=step_s)
        groups = (HistoryGroup("tokens", (Plane("id", 1, 4),), 1),)
        geometry = plan_geometry(groups, arena_dtype="float32", page_tokens=PAGE_TOKENS)
        self.config = dataclasses.replace(self.config, groups=groups, geometry=geometry)

    def bind(self, arena: ArenaSpec) -> None:
        self._arena = np.zeros((arena.num_pages, self.config.geometry.groups[0].page_entries), np.int32)

    def _advance(self, plan: BatchPlan, row: int, new: list[int], flag: int) -> int:
        slot, length = int(plan.slots[row]), int(plan.seq_lens[row])
        start = length - len(new)
        if flag & RowFlag.FROM_SLOT:
            new = self._sequences[slot][start:length]
        elif plan.phase is Phase.PREFILL:
            self._sequences[slot] = self._before(plan, row, start)
            self._plans.pop(slot, None)
        (group,) = plan.groups
        first = int(plan.query_indptr[row])
        pages, offsets = (places[first : first + len(new)] for places in plan.append_places(group.name))
        self._arena[pages, offsets] = new
        return super()._advance(plan, row, new, flag)

    def _before(self, plan: BatchPlan, row: int, count: int) -> list[int]:
        (group,) = plan.groups
        assert group.page_ids is not None and group.page_indptr is not None
        pages = group.page_ids[group.page_indptr[row] : group.page_indptr[row + 1]]
        return self._arena[pages].reshape(-1)[:count].tolist()
