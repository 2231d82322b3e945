"""The README's table of supported models is the one that the recorded outcomes give."""

from __future__ import annotations

import json

from resin.models.testing import TINY_CONFIGS
from tests.conformance.support import (
    BEGIN,
    COLUMNS,
    END,
    NAMES,
    OUTCOMES,
    README,
    keep_skipped,
    render,
    replace_table,
)


def test_readme_shows_the_recorded_outcomes() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == replace_table(text, render(json.loads(OUTCOMES.read_text())))


def test_every_family_has_a_row() -> None:
    assert set(NAMES) == set(TINY_CONFIGS)


def test_a_cell_says_yes_only_for_a_test_that_passed() -> None:
    outcomes = {
        "test_families.py::test_capability[lfm2-load]": "pass",
        "test_families.py::test_capability[lfm2-prefill]": "fail",
    }
    row = next(line for line in render(outcomes).splitlines() if line.startswith("| LFM2 |"))
    assert [cell.strip() for cell in row.split("|")[2:-2]] == ["yes", "no", *["-"] * (len(COLUMNS) - 2)]
    assert row.endswith("| - |")


def test_real_weights_count_only_if_every_test_of_theirs_passed() -> None:
    outcomes = {"test_gemma3.py::test_a": "pass", "test_gemma3.py::test_b": "skip"}
    assert "Gemma 3 270M" not in render(outcomes)
    assert "Gemma 3 270M" in render({"test_gemma3.py::test_a": "pass"})


def test_what_a_machine_skips_is_kept_from_an_earlier_run() -> None:
    earlier = {"a.py::1": "pass", "a.py::2": "pass", "a.py::3": "fail", "a.py::4": "skip", "a.py::gone": "pass"}
    found = {"a.py::1": "skip", "a.py::2": "fail", "a.py::3": "skip", "a.py::4": "skip", "a.py::new": "skip"}
    outcomes, kept = keep_skipped(found, earlier)
    assert outcomes == found | {"a.py::1": "pass", "a.py::3": "fail"}
    assert kept == ["a.py::1", "a.py::3"]
