"""The code-size report counts code, not prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cloc import component_of, count_lines

SOURCE = '''"""A docstring
of two lines."""

# a comment
import math


def area(radius: float) -> float:
    """Another docstring."""
    return math.pi * radius**2  # a trailing comment
'''


@pytest.mark.parametrize(
    ("path", "component"),
    [
        ("resin/engine.py", "resin"),
        ("resin/models/llama.py", "resin/models"),
        ("resin/models/loading/gguf.py", "resin/models"),
        ("serve/pages/chat.html", "serve"),
    ],
)
def test_component_of_a_path(path: str, component: str) -> None:
    assert component_of(Path(path)) == component


def test_counts_leave_out_blank_lines_comments_and_docstrings(tmp_path: Path) -> None:
    for name in ("resin/engine.py", "resin/plan/batch.py", "serve/app.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    (tmp_path / "resin/plan/notes.md").write_text("not code\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_engine.py").write_text(SOURCE)
    assert count_lines(tmp_path) == {"resin": (1, 3), "resin/plan": (1, 3), "serve": (1, 3)}
