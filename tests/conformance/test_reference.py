"""Recomputes the golden logits where transformers is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.reference
def test_goldens_are_what_transformers_computes() -> None:
    pytest.importorskip("transformers")
    # In a process of its own: torch and transformers warn, and warnings are errors here.
    command = [sys.executable, "-m", "tests.models.make_goldens", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("of the logits' deviation") == 8
