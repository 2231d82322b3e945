"""Tool definitions as the TypeScript-like declarations that harmony models were trained on.

Layout and quirks are those of the published renderer. Where it would write `any` or leave a part of the schema out
(`anyOf`, values that are no strings, later lines of a description), these declarations say what the schema says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from resin.recipes.messages import Tool

_MAX_DEPTH = 32
"""Schemas nested deeper are written as `any`."""

_STEP = "    "
_NAMES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


def write_namespace(name: str, tools: Sequence[Tool]) -> str:
    """Declarations of all tools, each a function type with one object argument."""
    lines = [f"## {name}", "", f"namespace {name} {{", ""]
    for tool in tools:
        lines += _comment(tool.description, "")
        argument = f"_: {_type_of({'type': 'object', **tool.parameters}, '', 0)}" if tool.parameters else ""
        lines += [f"type {tool.name} = ({argument}) => any;", ""]
    return "\n".join([*lines, f"}} // namespace {name}"])


def _comment(text: object, indent: str) -> list[str]:
    return [f"{indent}// {line}" for line in text.split("\n")] if isinstance(text, str) and text else []


def _type_of(schema: object, indent: str, depth: int) -> str:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    kind = schema.get("type")
    if isinstance(schema.get("oneOf"), list):
        variants = _variants(schema["oneOf"], indent, depth)
        return "".join(f"\n{indent} | {variant}" for variant in variants) or "any"
    if isinstance(schema.get("anyOf"), list):
        return _union(_type_of(option, indent, depth + 1) for option in schema["anyOf"])
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return _union(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if isinstance(kind, list):
        return " | ".join(_type_of({**schema, "type": option}, indent, depth + 1) for option in kind) or "any"
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, indent, depth)
    if kind == "array":
        return _array(schema, indent, depth)
    return _NAMES.get(str(kind), "any")


def _array(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    items = schema.get("items")
    if not isinstance(items, Mapping):
        return "Array<any>"
    element = _type_of(items, indent, depth + 1)
    return f"({element})[]" if isinstance(items.get("anyOf"), list) else f"{element}[]"


def _union(options: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(options)) or "any"


def _or_null(kind: str, schema: object) -> str:
    nullable = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{kind} | null" if nullable and "null" not in kind else kind


def _variants(options: Sequence[object], indent: str, depth: int, *, said: object = None) -> Iterator[str]:
    """The types of a `oneOf`, each with what is said of it unless a comment above says so: `said`, of the first too."""
    for index, option in enumerate(options):
        fields = option if isinstance(option, Mapping) else {}
        described = fields.get("description")
        is_said = described == said or (said and index == 0)
        about = [described] if isinstance(described, str) and not is_said else []
        about += [f"default: {_default(fields)}"] if "default" in fields else []
        kind = _or_null(_type_of(option, indent + "   ", depth + 1), option)
        yield f"{kind} // {' '.join(about)}" if about else kind


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) and all(isinstance(item, str) for item in required) else set()
    lines = [*_comment(schema.get("description"), indent), "{"]
    for key, value in properties.items():
        lines += _property(f"{key}{'' if key in needed else '?'}:", value, indent, depth)
    return "\n".join([*lines, indent + "}"])


def _property(name: str, schema: object, indent: str, depth: int) -> Iterator[str]:
    fields = schema if isinstance(schema, Mapping) else {}
    if fields.get("title"):
        yield from [*_comment(fields["title"], indent), f"{indent}//"]
    described = _comment(fields.get("description"), indent)
    has_variants = isinstance(fields.get("oneOf"), list)
    yield from () if has_variants else described
    if isinstance(fields.get("examples"), list) and fields["examples"]:
        yield f"{indent}// Examples:"
        for example in fields["examples"]:
            if isinstance(example, str):
                yield f'{indent}// - "{example}"'
    if has_variants:
        yield from described
        if "default" in fields:
            yield f"{indent}// default: {_default(fields)}"
        yield f"{indent}{name}"
        yield from (
            f"{indent} | {variant}"
            for variant in _variants(fields["oneOf"], indent, depth, said=fields.get("description"))
        )
        yield f"{indent},"
    else:
        default = f" // default: {_default(fields)}" if "default" in fields else ""
        kind = _or_null(_type_of(schema, indent + _STEP, depth + 1), schema)
        yield f"{indent}{name} {kind},{default}"


def _default(schema: Mapping[str, Any]) -> str:
    value = schema["default"]
    if isinstance(value, str) and isinstance(schema.get("enum"), list):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
