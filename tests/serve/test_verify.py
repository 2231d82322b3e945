"""`resin verify`: the checks that its help names, some of them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resin.conformance import choose_checks
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
from serve.cli import main
from serve.commands import verify


def test_the_help_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    reference = {"token_ids": np.arange(2), "logits": np.zeros((2, 4), np.float32)}
    assert verify.CHECKS == tuple(choose_checks(reference=reference))
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ", ".join(verify.CHECKS) in told


@pytest.mark.full
def test_named_checks_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write_checkpoint(tmp_path, random_checkpoint(TINY_CONFIGS["llama"], seed=5)))
    assert main(["verify", source, "--checks", "batched, prefix cold"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in verify.CHECKS if f"{name} " in printed] == ["batched", "prefix cold"]
    assert "all 2 checks passed" in printed


def test_an_unknown_check_is_refused_before_anything_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "no-such-model", "--checks", "drafts,speed"]) == 1
    assert capsys.readouterr().err.startswith("resin: checks='speed': expected one of plain forward, batched,")
