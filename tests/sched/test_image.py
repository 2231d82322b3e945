"""Decode plans made from the one before equal plans made from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from resin import BatchPlan, Bucket, Engine, SamplingParams, WindowGroup
from resin.sched.buffers import BufferPool
from resin.sched.image import DecodeImage
from resin.sched.rows import DecodeRows
from tests.fakes import OverlapFake, PagedFake, fake_config, history_group, state_group, window_group

RUNNERS = pytest.mark.parametrize("runner_class", [PagedFake, OverlapFake], ids=["sync", "overlap"])
GROUPS = {
    "history": (history_group(),),
    "compressed": (history_group(), history_group(4, "compressed")),
    "window": (window_group(6), history_group()),
    "all": (history_group(), window_group(9), state_group(16, rows=20), window_group(5, "short")),
}


def check_same(plan: BatchPlan, fresh: np.ndarray, ahead: int) -> None:
    """The columns of the plan and of a buffer made from nothing; a Window row may still show older pages in front: one,
    and as many as it held ahead for drafts when it last grew."""
    count = plan.num_sequences
    windows = {spec.name for spec, _ in plan.group_specs if isinstance(spec, WindowGroup)}
    for name in plan.layout.by_name:
        if name.partition(":")[2] not in windows or name.startswith("append"):
            assert np.array_equal(plan.column(name), plan.layout.view(fresh, name)), name
    spans = {spec.name: fill.span_tokens for spec, fill in plan.group_specs}
    for name in windows:
        columns = [f"{field}:{name}" for field in ("page_indptr", "page_ids", "first_position")]
        indptr, ids, firsts = (plan.column(column) for column in columns)
        fresh_indptr, fresh_ids, fresh_firsts = (plan.layout.view(fresh, column) for column in columns)
        for i in range(count):
            row, want = ids[indptr[i] : indptr[i + 1]], fresh_ids[fresh_indptr[i] : fresh_indptr[i + 1]]
            older = len(row) - len(want)
            assert 0 <= older <= 1 + ahead and row[older:].tolist() == want.tolist()
            assert firsts[i] + older * spans[name] == fresh_firsts[i]
        assert not ids[indptr[count] :].any() and (indptr[count:] == indptr[count]).all()


def watch(engine: Engine) -> list[int]:
    """Compares every decode plan of the engine; returns a list that gets the rows of each patched one."""
    planner = engine.scheduler.replicas[0].planner
    plan_decode, patched = planner.plan_decode, []

    def compare(
        step: int, bucket: Bucket, rows: DecodeRows, growing: list[list[int]], masks: Any, drafts: Any
    ) -> BatchPlan:
        short, dirty, changed = set(rows.short), set(rows.dirty), set(rows.changed)
        fresh = DecodeImage(bucket, planner._decode_columns(bucket), rows, BufferPool()).write_next(growing, drafts)
        rows.short, rows.dirty, rows.changed = short, dirty, changed
        is_patch = planner.image is not None and planner.image.bucket is bucket
        plan = plan_decode(step, bucket, rows, growing, masks, drafts)
        check_same(plan, fresh, 2 if engine.config.draft_tokens else 0)
        if is_patch:
            patched.append(len(rows.live()))
        return plan

    planner.plan_decode = compare  # type: ignore[method-assign]
    return patched


@RUNNERS
@pytest.mark.parametrize("drafts", [0, 3], ids=["one token", "drafts"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("groups", GROUPS)
def test_patched_plans_equal_fresh_ones(
    groups: str, prefix_cache: bool, drafts: int, runner_class: type[PagedFake]
) -> None:
    config = fake_config(GROUPS[groups], max_sequences=6, draft_tokens=drafts)
    rng = np.random.default_rng(len(groups))
    runner = runner_class(config)
    runner.guess = lambda truth: [token + (rng.random() < 0.4) for token in truth]
    with Engine(runner, prefix_cache=prefix_cache) as engine:
        patched = watch(engine)
        shared = rng.integers(0, 250, 40)
        for i, size in enumerate((3, 38, 17, 40, 40, 38, 1, 25)):
            stops = tuple(rng.integers(0, 250, i % 3).tolist())
            mask = (lambda output: None) if i == 4 else None
            params = SamplingParams(
                allowed_tokens=mask,
                max_output_tokens=60 + i,
                temperature=0.5 * (i % 2),
                top_k=i,
                stop_token_ids=stops,
                min_output_tokens=i,
            )
            engine.submit(shared[:size], sampling_params=params)
        while engine.has_work():
            engine.step()
            engine.scheduler.check_integrity()
    assert len(patched) > 40 and max(patched) == 6
