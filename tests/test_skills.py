"""The guides for coding agents: well-formed, ending in a command, and naming only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS
from serve.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))


def test_both_guides_are_there() -> None:
    assert [path.parent.name for path in SKILLS] == ["add-resin-model", "optimize-resin-performance"]


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_guide_is_well_formed_and_ends_in_one_command(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == path.parent.name and len(fields["description"]) > 80
    last = body.rpartition("## Done when this succeeds")[2].rstrip().splitlines()
    assert [line for line in last if line.startswith("    ")] == last[-1:]


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_guide_names_only_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (path.parent / target).exists(), target
    for name in re.findall(r"`((?:resin|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"python -m (bench|tests[\w.]*) ?(\w*)", text):
        module, command = name
        assert command in COMMANDS if module == "bench" else (ROOT / (module.replace(".", "/") + ".py")).exists(), name
    for command in re.findall(r"resin (verify|inspect|\w+) [A-Z]", text):
        assert f" {command} " in f" {build_parser().format_help()} ".replace("\n", " "), command
