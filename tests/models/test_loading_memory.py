from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    "megabytes", [pytest.param(400, id="small"), pytest.param(8000, marks=pytest.mark.slow, id="8 GB")]
)
def test_loading_never_holds_two_copies(tmp_path: Path, megabytes: int) -> None:
    command = [sys.executable, "-m", "tests.models.loading_memory", str(tmp_path / "made"), str(megabytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["bytes"] > 0.8e6 * megabytes
    assert report["peak_share"] < 1.3, report
    assert report["progress_calls"] > 100 and report["progress_rises"]
