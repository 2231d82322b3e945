"""Tool definitions as the TypeScript-like declarations that harmony models were trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resin.recipes.messages import Tool

_MAX_DEPTH = 32
"""Schemas nested deeper are written as `any`."""


def write_namespace(name: str, tools: Sequence[Tool]) -> str:
    """Declarations of all tools, each a function type with one object argument."""
    lines = [f"## {name}", "", f"namespace {name} {{", ""]
    for tool in tools:
        lines += _comment(tool.description)
        if tool.parameters:
            argument = _object(tool.parameters, 0)
            lines += [f"type {tool.name} = (_: {argument}) => any;", ""]
        else:
            lines += [f"type {tool.name} = () => any;", ""]
    return "\n".join([*lines, f"}} // namespace {name}"])


def _comment(text: object) -> list[str]:
    return [f"// {line}" for line in text.split("\n")] if isinstance(text, str) and text else []


def _type_of(schema: object, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list):
            return _union(_type_of(option, depth + 1) for option in schema[union])
    kind = schema.get("type")
    if isinstance(schema.get("enum"), list):
        return _union(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if isinstance(kind, list):
        return _union(_type_of({**schema, "type": option}, depth + 1) for option in kind)
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, depth)
    if kind == "array":
        return f"{_type_of(schema.get('items'), depth + 1)}[]"
    return {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}.get(
        str(kind), "any"
    )


def _union(options: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(options)) or "any"


def _object(schema: Mapping[str, Any], depth: int) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    indent = "    " * depth
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) and all(isinstance(item, str) for item in required) else set()
    lines = ["{"]
    for key, value in properties.items():
        fields = value if isinstance(value, Mapping) else {}
        lines += [indent + line for line in _comment(fields.get("description"))]
        default = f" // default: {_default(fields['default'])}" if "default" in fields else ""
        lines.append(f"{indent}{key}{'' if key in needed else '?'}: {_type_of(value, depth + 1)},{default}")
    return "\n".join([*lines, indent + "}"])


def _default(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
