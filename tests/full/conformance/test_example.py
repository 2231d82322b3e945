"""The page on adding a model tells the truth: its file, its checkpoint and its commands work as printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serve.cli import main
from tests.conformance.example import MODEL, PAGE, write_example

REFERENCE = Path(__file__).parents[2] / "data" / "goldens" / "arcee.npz"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    directory = write_example(tmp_path)
    # The commands find the file by themselves, in the directory where they are run.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    sys.modules.pop("arcee", None)
    monkeypatch.chdir(tmp_path)
    yield directory
    sys.modules.pop("arcee", None)


def test_the_file_is_as_short_as_promised() -> None:
    assert MODEL.count("\n") < 60


def test_commands_of_the_page(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line.split() for line in PAGE.read_text().splitlines() if line.startswith("    resin ")]
    inspect, verify = ([str(REFERENCE) if word == "arcee.npz" else word for word in command] for command in commands)
    assert main(inspect[1:]) == 0
    shown = capsys.readouterr().out
    assert "Arcee, 0.1 M parameters" in shown
    assert "model.layers.0.mlp.up_proj.weight" in shown
    assert main(verify[1:]) == 0
    table = capsys.readouterr().out
    named = {
        name.strip()
        for row in PAGE.read_text().split("| --- | --- |")[1].split("\n\n")[0].strip().splitlines()
        for name in row.split("|")[1].split(",")
    }
    assert table.endswith(f"all {len(named)} checks passed\n")
    assert named == {line[6:].split("  ")[0].strip() for line in table.splitlines()[1:-1]}
