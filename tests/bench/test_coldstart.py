"""Cold start reports every phase of a run in a new process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.coldstart import PHASES, Stopwatch, main, print_report
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint


def test_a_stopwatch_accounts_for_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([101.5, 104.0])
    monkeypatch.setattr("time.time", lambda: next(times))
    watch = Stopwatch(100.0)
    watch.stop("python")
    watch.stop("import")
    assert watch.phases_s == {"python": 1.5, "import": 2.5}


def test_a_report_has_a_column_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    phases = {phase: float(place) for place, phase in enumerate(PHASES)}
    run = {"phases_s": phases, "total_s": 21.0, "executables": 25, "ledger": "all", "jax": "1", "device": "GPU"}
    print_report([run, run | {"total_s": 9.0}])
    lines = capsys.readouterr().out.splitlines()
    assert "25 executables" in lines[0]
    assert [line.split()[-1] for line in lines[2:-1]] == [f"{place:.2f}" for place in range(len(PHASES))]
    assert lines[-1].split() == ["total", "21.00", "9.00"]


@pytest.mark.slow
def test_a_second_start_finds_its_programs(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", random_checkpoint(TINY_CONFIGS["llama"], seed=5))
    output = tmp_path / "report.json"
    sizes = "--max-sequences 4 --max-context-tokens 64 --cache-bytes 4000000"
    assert main(["--model", str(model), *sizes.split(), "--output", str(output)]) == 0
    first, second = json.loads(output.read_text())
    for run in (first, second):
        assert list(run["phases_s"]) == list(PHASES)
        assert run["total_s"] == pytest.approx(sum(run["phases_s"].values()))
        assert run["executables"] > 2
    assert second["phases_s"]["compile"] < first["phases_s"]["compile"]
