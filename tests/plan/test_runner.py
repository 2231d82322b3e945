"""RunnerConfig and what the Engine discovers of a runner."""

from __future__ import annotations

from typing import Any

import pytest

from resin import ArenaSpec, Bucket, InvalidRequest, OverlapRunner, Phase, Runner, RunnerConfig, plan_geometry
from resin.plan.runner import runner_config, runner_observations
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


def test_what_a_runner_declares() -> None:
    class Odd:
        config = "big"

    config = fake_config(GROUPS)
    assert runner_config(PagedFake(config)) is config
    assert runner_config(object()) == RunnerConfig()
    with pytest.raises(InvalidRequest, match="RunnerConfig"):
        runner_config(Odd())
    assert runner_observations(object()) == {}
    assert isinstance(PagedFake(config), Runner) and not isinstance(PagedFake(config), OverlapRunner)
    assert isinstance(OverlapFake(config), OverlapRunner)
