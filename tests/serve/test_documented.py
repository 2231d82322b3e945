"""The tables of docs/serving.md say what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from resin.plan.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from resin.recipes.calls import MAX_NESTING
from resin.recipes.grammar import _FORMATS
from serve import ServerConfig
from serve.endpoints.completions import MAX_PROMPTS
from serve.schemas.body import Hint, Refused
from serve.schemas.sampling import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from serve.structured import MAX_OPTIONAL_PROPERTIES, MAX_SCHEMA_CHARACTERS, MAX_STRING_CHARACTERS
from tests.serve.test_fields import BODIES, fields_of

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
UNITS = {"MiB": 1 << 20}


def table(head: str) -> list[list[str]]:
    """The cells under a table's head."""
    lines = PAGE[PAGE.index(f"\n| {head} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def numbers(cell: str) -> list[float]:
    return [float(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"(\d[\d.]*)(?: (MiB))?", cell)]


def test_limits_of_the_server() -> None:
    documented: dict[str, float | None] = {}
    for names, defaults, _ in table("field"):
        found = re.findall(r"`(\w+)`", names)
        values: list[float | None] = [*numbers(defaults)] or [None]
        documented |= dict(zip(found, values, strict=True))
    config = ServerConfig()
    kinds = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "port"}
    limits = {name: value for name, value in kinds.items() if value is None or isinstance(value, int | float)}
    assert documented == limits
    assert {name: value for name, value in limits.items() if value is not None} == config.limits()


def test_limits_of_a_request() -> None:
    assert [numbers(most) for _, most in table("what | at most")] == [
        [MAX_PROMPTS],
        [MAX_STOP_STRINGS, MAX_STOP_CHARACTERS],
        [MAX_STOP_TOKENS],
        [MAX_LOGIT_BIAS],
        [MAX_TOP_LOGPROBS],
        [MAX_NESTING],
        [MAX_SCHEMA_CHARACTERS],
        [MAX_OPTIONAL_PROPERTIES],
        [MAX_STRING_CHARACTERS],
    ]


@pytest.mark.parametrize(("row", "path"), list(enumerate(BODIES)))
def test_fields_that_are_refused_or_hints(row: int, path: str) -> None:
    api, refused, hints = table("API")[row]
    kind = BODIES[path][0]
    assert kind.__name__.startswith((api, api.rstrip("s")))
    assert set(re.findall(r"`(\w+)`", refused)) == fields_of(kind, Refused)
    assert set(re.findall(r"`(\w+)`", hints)) == fields_of(kind, Hint)


def test_formats_that_bind() -> None:
    sentence = re.search(r"`format` is enforced for (.*?);", PAGE, re.DOTALL)
    assert sentence is not None and set(re.findall(r"`([\w-]+)`", sentence[1])) == _FORMATS
