"""RunnerConfig and what the Engine discovers of a runner."""

from __future__ import annotations

from typing import Any

import pytest

from resin import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    ForwardOutput,
    InvalidRequest,
    OverlapRunner,
    Phase,
    Runner,
    RunnerConfig,
    plan_geometry,
)
from resin.plan import RunnerParts
from tests.fakes import OverlapFake, PagedFake, fake_config, history_group

GROUPS = (history_group(),)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_context_tokens": 1}, "max_context_tokens"),
        ({"max_plan_tokens": 0}, "max_plan_tokens"),
        ({"groups": GROUPS}, "geometry"),
        ({"geometry": plan_geometry(GROUPS, arena_dtype="float32")}, "geometry"),
        ({"buckets": (Bucket(Phase.PREFILL, 1, 8, ()),)}, "buckets"),
        ({"buckets": (Bucket(Phase.DECODE, 1, 1, ()),)}, "buckets"),
    ],
)
def test_configs_that_cannot_work_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        RunnerConfig(**settings)
    assert error.value.field == field


def test_an_arena_knows_its_bytes() -> None:
    assert ArenaSpec(num_pages=3, page_bytes=1 << 40, dtype="bfloat16").total_bytes == 3 << 40


def test_what_a_runner_offers() -> None:
    class Bare:
        def forward(self, plan: BatchPlan) -> ForwardOutput:
            raise NotImplementedError

    class Odd(Bare):
        config = "big"

    config = fake_config(GROUPS)
    runner = PagedFake(config)
    found = RunnerParts.of(runner)
    assert found.config is config and found.bind == runner.bind and found.free_pages is None
    bare = RunnerParts.of(Bare())
    assert bare == RunnerParts() and bare.config == RunnerConfig()
    bare.unbind()
    assert bare.observations() == {} and bare.bind is None and bare.eos_token_ids == ()
    with pytest.raises(InvalidRequest, match="RunnerConfig"):
        RunnerParts.of(Odd())
    with pytest.raises(InvalidRequest, match="forward"):
        RunnerParts.of(object())
    assert isinstance(runner, Runner) and not isinstance(runner, OverlapRunner)
    assert isinstance(OverlapFake(config), OverlapRunner)
