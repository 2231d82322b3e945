"""The example of docs/adding-a-model.md, as files."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "adding-a-model.md"
MODEL, CHECKPOINT = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def write_example(directory: Path) -> Path:
    """Writes `arcee.py`, puts it on the import path, and makes the page's checkpoint; returns its directory."""
    (directory / "arcee.py").write_text(MODEL, encoding="utf-8")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    with contextlib.chdir(directory):
        exec(compile(CHECKPOINT, str(PAGE), "exec"), {})
    return directory / "tiny-arcee"
