"""Declarations of tools in the TypeScript of harmony prompts."""

from __future__ import annotations

from typing import Any

import pytest

from resin.recipes import Tool
from resin.recipes.typescript import write_namespace

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number", "description": "Up"}}}


def declared(*lines: str) -> str:
    return "\n".join(["## functions", "", "namespace functions {", "", *lines, "", "} // namespace functions"])


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "arrays indent their elements once",
        {"a": {"type": "array", "items": {"type": "array", "items": POINT}}},
        ["a?: {", "    x?: number,", "    // Up", "    y?: number,", "    }[][],"],
    ),
    (
        "objects in objects",
        {"a": {"type": "object", "properties": {"b": {"type": "array", "items": POINT}}}},
        ["a?: {", "    b?: {", "        x?: number,", "        // Up", "        y?: number,", "        }[],", "    },"],
    ),
    ("arrays of anything", {"a": {"type": "array"}}, ["a?: Array<any>,"]),
    (
        "defaults are JSON, those of an enum are bare",
        {"a": {"type": "string", "default": "x"}, "b": {"type": "string", "enum": ["c"], "default": "c"}},
        ['a?: string, // default: "x"', 'b?: "c", // default: c'],
    ),
    (
        "one of",
        {"a": {"oneOf": [{"type": "string", "description": "S"}, {"type": "integer", "default": 1}], "default": 1}},
        ["// default: 1", "a?:", " | string // S", " | number // default: 1", ","],
    ),
    ("several types", {"a": {"type": ["string", "null"]}}, ["a?: string | null,"]),
    ("nullable", {"a": {"type": "string", "nullable": True}}, ["a?: string | null,"]),
    (
        "titles and examples",
        {"a": {"type": "string", "title": "T", "description": "D", "examples": ["x"]}},
        ["// T", "//", "// D", "// Examples:", '// - "x"', "a?: string,"],
    ),
    ("every line of a description", {"a": {"description": "One\nTwo"}}, ["// One", "// Two", "a?: any,"]),
    (
        "unions that others write as any",
        {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "b": {"type": "array", "items": {"anyOf": [POINT]}}},
        ["a?: string | null,", "b?: ({", "    x?: number,", "    // Up", "    y?: number,", "    })[],"],
    ),
    (
        "values of other types",
        {"a": {"type": "integer", "enum": [1, 2]}, "b": {"enum": ["x"]}},
        ["a?: 1 | 2,", 'b?: "x",'],
    ),
]


@pytest.mark.parametrize(("properties", "lines"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_types(properties: dict[str, Any], lines: list[str]) -> None:
    tool = Tool("f", "Does it.\nWell.", {"type": "object", "properties": properties})
    expected = declared("// Does it.", "// Well.", "type f = (_: {", *lines, "}) => any;")
    assert write_namespace("functions", [tool]) == expected


def test_tools_without_arguments() -> None:
    tools = [Tool("bare"), Tool("empty", "", {"type": "object", "properties": {}})]
    expected = declared("type bare = () => any;", "", "type empty = (_: {", "}) => any;")
    assert write_namespace("functions", tools) == expected


def test_schemas_without_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    tool = Tool("f", "", {"type": "object", "properties": {"a": schema}})
    assert "a?: any[]" in write_namespace("functions", [tool])
