"""Recordings hold every plan and output exactly, and survive being cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.replay import main, replay, requests_read_by, select_requests
from resin import Engine, ForwardOutput, RunnerConfig, SamplingParams
from resin.record import MAGIC, VERSION, BadRecording, Recording
from tests.fakes import OverlapFake, PagedFake, fake_config, history_group, state_group, window_group

GROUPS = (history_group(), window_group(10), state_group(8, rows=20))
CONFIG, DRAFTED = fake_config(GROUPS), fake_config(GROUPS, draft_tokens=3)
WIDTHS = pytest.mark.parametrize("config", [CONFIG, DRAFTED], ids=["one token", "drafts"])
SHARED = [(7 * i) % 251 for i in range(40)]


def record_run(path: Path, *, masked: bool = False, config: RunnerConfig = CONFIG) -> list[list[int]]:
    allowed = np.zeros(251, np.bool_)
    allowed[::2] = True
    params = [
        SamplingParams(max_output_tokens=9, temperature=0),
        SamplingParams(max_output_tokens=5, temperature=0.5, seed=3, logit_bias={4: 2.5}, min_output_tokens=2),
        SamplingParams(max_output_tokens=7, allowed_tokens=(lambda output: allowed) if masked else None),
    ]
    with Engine(OverlapFake(config), prefix_cache=True, record=path) as engine:
        first = engine.submit(SHARED, sampling_params=params[0])
        while engine.has_work():
            engine.step()
        others = [engine.submit(SHARED[:24] + [i] * (i + 3), sampling_params=params[i % 3]) for i in range(5)]
        while engine.has_work():
            engine.step()
        return [request.take_result() for request in (first, *others)]


def test_plans_come_back_as_they_were(tmp_path: Path) -> None:
    runner = PagedFake(CONFIG)
    path = tmp_path / "run.plans"
    with Engine(runner, record=path) as engine:
        for i in range(6):
            engine.submit(SHARED[: 10 + i], sampling_params=SamplingParams(max_output_tokens=4, logit_bias={1: 1.0}))
        while engine.has_work():
            engine.step()
    recording = Recording(path)
    assert recording.config == CONFIG and recording.arena == engine.arena
    assert len(recording.steps) == len(runner.plans)
    for step, plan in zip(recording.steps, runner.plans, strict=True):
        assert np.array_equal(step.plan.buffer, plan.buffer) and step.plan.bucket == plan.bucket
        assert step.plan.request_ids == plan.request_ids and step.plan.step == plan.step
        assert step.output is not None
        for mine, theirs in zip(step.plan.slot_loads, plan.slot_loads, strict=True):
            assert (mine.slot, mine.count_row) == (theirs.slot, theirs.count_row)
            assert mine.prompt_tokens == theirs.prompt_tokens
            assert np.array_equal(mine.token_ids, theirs.token_ids)
            assert np.array_equal(mine.bias_values, theirs.bias_values)


def test_masks_are_recorded(tmp_path: Path) -> None:
    record_run(tmp_path / "run.plans", masked=True)
    masks = [step.plan.allowed_masks for step in Recording(tmp_path / "run.plans").steps]
    present = [mask for mask in masks if mask is not None]
    assert present and all(mask.dtype == np.int32 and mask.shape[1] == 8 for mask in present)


@WIDTHS
def test_replay_agrees_with_the_run(config: RunnerConfig, tmp_path: Path) -> None:
    record_run(tmp_path / "run.plans", config=config)
    recording = Recording(tmp_path / "run.plans")
    assert recording.config == config
    assert {step.plan.bucket.width for step in recording.steps} == {1, 1 + config.draft_tokens}
    runner = PagedFake(config)
    runner.bind(recording.arena)
    assert replay(recording.steps, runner, logprob_tolerance=0) == (len(recording.steps), None)


def test_replay_names_the_first_difference(tmp_path: Path) -> None:
    class Wrong(PagedFake):
        def forward(self, plan):  # type: ignore[no-untyped-def]
            output = super().forward(plan)
            if plan.step < 9:
                return output
            return ForwardOutput((output.token_ids.astype(np.int64) + 1) % 251, output.token_indptr)

    record_run(tmp_path / "run.plans")
    recording = Recording(tmp_path / "run.plans")
    runner = Wrong(CONFIG)
    runner.bind(recording.arena)
    agreed, difference = replay(recording.steps, runner, logprob_tolerance=0)
    assert difference is not None and difference.step >= 9 and agreed == difference.step
    assert f"request {difference.request_id}" in str(difference)


@WIDTHS
def test_one_request_replays_with_those_it_read_from(config: RunnerConfig, tmp_path: Path) -> None:
    record_run(tmp_path / "run.plans", config=config)
    recording = Recording(tmp_path / "run.plans")
    wanted = requests_read_by(recording, 3)
    assert wanted == {0, 3}, "request 3 reused the prefix that request 0 computed"
    steps = list(select_requests(recording, wanted))
    assert {request for step in steps for request in step.plan.request_ids} == wanted
    runner = PagedFake(config)
    runner.bind(recording.arena)
    assert replay(steps, runner, logprob_tolerance=0) == (len(steps), None)


def test_a_cut_recording_is_readable_up_to_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.plans"
    record_run(path)
    whole, size = Recording(path), path.stat().st_size
    path.write_bytes(path.read_bytes()[: size * 2 // 3])
    cut = Recording(path)
    assert 0 < len(cut.steps) < len(whole.steps)
    assert np.array_equal(cut.steps[0].plan.buffer, whole.steps[0].plan.buffer)


@pytest.mark.parametrize("content", [b"", b"not a recording at all", MAGIC + b"\x00\x01"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(BadRecording):
        Recording(path)


@pytest.mark.parametrize("version", [b"1", b"2", b"10"])
def test_recordings_of_other_versions_are_refused_by_name(tmp_path: Path, version: bytes) -> None:
    path = tmp_path / "run.plans"
    record_run(path)
    path.write_bytes(path.read_bytes().replace(MAGIC, b"resin-plans-" + version + b"\n", 1))
    with pytest.raises(BadRecording, match=f"version {version[:1].decode()}.*reads version {VERSION}"):
        Recording(path)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.plans"
    record_run(path)
    assert main([str(path)]) == 0
    assert "6 requests" in capsys.readouterr().out
    assert main([str(path), "--request", "2"]) == 0
    assert "prefill" in capsys.readouterr().out
    assert main([str(path), "--runner", "tests.fakes:PagedFake", "--only", "4"]) == 0
    assert "steps agree" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "missing")])
