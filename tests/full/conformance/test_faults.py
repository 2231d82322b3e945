"""The kit's tolerances let rounding pass and nothing else: one wrong page, or one wrong bit of a position, is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from resin.conformance import ConformanceKit, Settings
from resin.conformance.equalities import plain_forward
from resin.models.registry import open_checkpoint
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.plan import BatchPlan, Phase, RowFlag, StateGroup, build_plan

Columns = dict[str, np.ndarray]
DEEP = 10  # tokens before the one that a fault hits: what sees nothing cannot be wrong


@cache
def kit_of(model: str) -> ConformanceKit:
    checkpoint = random_checkpoint(TINY_CONFIGS[model], seed=5) if model in TINY_CONFIGS else open_checkpoint(model)
    return ConformanceKit(checkpoint, settings=Settings(buckets=False, output_tokens=6))


def names(columns: Columns, part: str) -> Iterator[str]:
    return (name for name in columns if name.startswith(f"{part}:"))


def read_page_twice(plan: BatchPlan, columns: Columns) -> bool:
    """The first page of a row, instead of the second."""
    for name in names(columns, "page_ids"):
        starts = columns[name.replace("page_ids", "page_indptr")]
        for row in range(plan.num_sequences):
            if starts[row + 1] - starts[row] >= 2:
                columns[name][starts[row] + 1] = columns[name][starts[row]]
                return True
    return False


def shift_pages(plan: BatchPlan, columns: Columns) -> bool:
    """The pages of one sequence hold the tokens a page further on."""
    row = int(np.argmax(columns["computed"]))
    for spec, fill in plan.group_specs:
        if not isinstance(spec, StateGroup):
            columns[f"first_position:{spec.name}"][row] += fill.span_tokens
    return bool(columns["computed"][row] >= DEEP)


def shift_positions(plan: BatchPlan, columns: Columns) -> bool:
    """One sequence stands one token further on."""
    row = int(np.argmax(columns["computed"]))
    columns["computed"][row] ^= 1
    return bool(columns["computed"][row] >= DEEP and not columns["row_flags"][row] & RowFlag.FROM_SLOT)


def lose_state(plan: BatchPlan, columns: Columns) -> bool:
    """One sequence reads the scratch page."""
    found = False
    for name in names(columns, "input_pages"):
        found = plan.phase is Phase.DECODE
        columns[name][0] = 0
    return found


FAULTS: dict[str, Callable[[BatchPlan, Columns], bool]] = {
    "page": read_page_twice,
    "pages": shift_pages,
    "position": shift_positions,
    "state": lose_state,
}


def plant(kit: ConformanceKit, fault: Callable[[BatchPlan, Columns], bool], patch: pytest.MonkeyPatch) -> list[int]:
    """Makes one plan wrong, the first that the fault can be seen in; returns what will hold its step."""
    dispatch, planted = kit.runner.dispatch, []

    def faulty(plan: BatchPlan) -> Any:
        buffer = plan.buffer.copy()
        if not planted and fault(plan, plan.layout.views(buffer)):
            planted.append(plan.step)
            plan = build_plan(
                kit.runner.config,
                plan.bucket,
                buffer,
                step=plan.step,
                request_ids=plan.request_ids,
                slot_loads=plan.slot_loads,
                allowed_masks=plan.allowed_masks,
            )
        return dispatch(plan)

    patch.setattr(kit.runner, "dispatch", faulty)
    return planted


def check(model: str, fault: str, patch: pytest.MonkeyPatch) -> None:
    kit = kit_of(model)
    passed, detail = plain_forward(kit)
    assert passed, detail
    kit.runner.replace_arena(lambda arena: arena * 0 + 1)  # the first run left there what this one should
    planted = plant(kit, FAULTS[fault], patch)
    passed, detail = plain_forward(kit)
    assert planted and not passed, detail
    largest = float(detail.split()[3].rstrip(","))
    assert not largest <= 10 * kit.tolerance, detail  # no close call


@pytest.mark.parametrize(
    ("family", "fault"),
    [("gemma3_text", "page"), ("gemma3_text", "pages"), ("gemma3_text", "position"), ("lfm2", "state")],
)
def test_a_fault_is_found(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(family, fault, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["page", "pages", "position"])
@pytest.mark.parametrize("model", [*TINY_CONFIGS, "smollm2-135m"])
def test_a_fault_is_found_in_every_family(model: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(model, fault, monkeypatch)
