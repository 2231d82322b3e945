"""How model families write tool calls, beyond JSON: the texts between their tags, and the table of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from resin.recipes.calls import Call, arguments_json, dump_json, read_json_calls, read_python_calls
from resin.recipes.messages import Tool
from resin.recipes.tagged import Tags

_ESCAPE = "<escape>"
_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001


def read_marked_calls(text: str, tools: Sequence[Tool] = ()) -> list[Call] | None:
    """`<function=name><parameter=key>value</parameter></function>`: values are bare, their types the tool's.

    Returns:
        None if any part of the text is something else.
    """
    calls = []
    rest = text.strip()
    while rest:
        function = _FUNCTION.match(rest)
        if function is None or _PARAMETER.sub("", function[2]).strip():
            return None
        types = _types_of(function[1], tools)
        arguments = {name: _typed(value, types.get(name)) for name, value in _PARAMETER.findall(function[2])}
        calls.append(Call(function[1], dump_json(arguments)))
        rest = rest[function.end() :].lstrip()
    return calls or None


_FUNCTION = re.compile(r"(?s)<function=([^>\s]+)>(.*?)</function>")
_PARAMETER = re.compile(r"(?s)<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>")


def _types_of(name: str, tools: Sequence[Tool]) -> Mapping[str, Any]:
    for tool in tools:
        if tool.name == name and isinstance(tool.parameters.get("properties"), Mapping):
            found: Mapping[str, Any] = tool.parameters["properties"]
            return found
    return {}


def _typed(text: str, schema: object) -> Any:
    """The value as the schema has it, or the text itself where that is a string or says nothing."""
    kinds = set(_kinds(schema))
    if not kinds - {"string"}:
        return text
    try:
        value = json.loads(text if text not in ("True", "False", "None") else _JSON_WORDS[text])
    except (ValueError, RecursionError):
        return text
    return value if _kind_of(value) & kinds else text


_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _kinds(schema: object) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    given = schema.get("type")
    yield from given if isinstance(given, list) else [given] if isinstance(given, str) else []
    for union in ("anyOf", "oneOf"):
        for option in schema[union] if isinstance(schema.get(union), list) else []:
            yield from _kinds(option)


def _kind_of(value: Any) -> set[str]:
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string"} if isinstance(value, str) else {"array" if isinstance(value, list) else "object"}


def read_escaped_calls(text: str, tools: Sequence[Tool] = ()) -> list[Call] | None:
    """`call:name{key:<escape>text<escape>,other:1}`; None if the text is something else."""
    head = _CALL_HEAD.match(text.strip())
    if head is None:
        return None
    try:
        value, end = _read_escaped(text.strip(), head.end() - 1, 0)
    except (ValueError, IndexError, RecursionError):
        return None
    if text.strip()[end:] or not isinstance(value, dict):
        return None
    return [Call(head[1], dump_json(value))]


_CALL_HEAD = re.compile(r"call:([^{\s]+)\{")
_BARE = re.compile(r"[^,:{}\[\]]+")


def _read_escaped(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value that begins at an index, and where it ends; ValueError or IndexError if none does."""
    if depth > _MAX_NESTING:
        raise ValueError("nested too deeply")
    if text.startswith(_ESCAPE, at):
        end = text.index(_ESCAPE, at + len(_ESCAPE))
        return text[at + len(_ESCAPE) : end], end + len(_ESCAPE)
    if text[at] not in "{[":
        bare = _BARE.match(text, at)
        if bare is None:
            raise ValueError("no value")
        return _bare_value(bare.group().strip()), bare.end()
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    is_object, close, at = text[at] == "{", "}" if text[at] == "{" else "]", at + 1
    while text[at] != close:
        if is_object:
            key, at = _read_key(text, at)
            pairs[key], at = _read_escaped(text, at, depth + 1)
        else:
            item, at = _read_escaped(text, at, depth + 1)
            items.append(item)
        if text[at] == ",":
            at += 1
        elif text[at] != close:
            raise ValueError("expected , or a closing bracket")
    return (pairs if is_object else items), at + 1


_MAX_NESTING = 64


def _bare_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_ESCAPE, at):
        key, at = _read_escaped(text, at, 0)
    else:
        end = text.index(":", at)
        key, at = text[at:end].strip(), end
    if text[at] != ":":
        raise ValueError("expected :")
    return key, at + 1


def read_separated_calls(text: str, tools: Sequence[Tool] = ()) -> list[Call] | None:
    """DeepSeek's: name, separator, JSON; older models write a type, separator, name and JSON in a code fence."""
    before, found, after = text.partition(_SEPARATOR)
    if not found:
        return None
    fenced = _FENCED.fullmatch(after.strip())
    name, arguments = (fenced[1], fenced[2]) if fenced else (before.strip(), after.strip())
    read = arguments_json(arguments)
    return None if read is None or not name or not name.isprintable() else [Call(name, read)]


_FENCED = re.compile(r"(?s)([^\n]+)\n```json\n(.*)\n```")


def read_named_calls(text: str, tools: Sequence[Tool] = ()) -> list[Call] | None:
    """Name, `[ARGS]` and JSON; None if the text is something else."""
    named = _NAMED.fullmatch(text.strip())
    arguments = None if named is None else arguments_json(named[2])
    return None if named is None or arguments is None else [Call(named[1], arguments)]


_NAMED = re.compile(r"(?s)([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)")


def read_pythonic_calls(text: str, tools: Sequence[Tool] = ()) -> list[Call] | None:
    """`[name(key="value")]`."""
    return read_python_calls(text)


def _tags(
    opening: str,
    closing: str,
    read: CallReader | None = None,
    *,
    inner: tuple[str, ...] = (),
    frame: tuple[str, ...] = (),
) -> Tags:
    """Where a grammar binds the model, it writes JSON, whatever its own format is."""

    def read_calls(text: str, tools: Sequence[Tool]) -> list[Call] | None:
        return (read(text, tools) if read is not None else None) or read_json_calls(text)

    return Tags(tool_call=(opening, closing), read_calls=read_calls, inner=inner, frame=frame)


CallReader = Callable[[str, Sequence[Tool]], "list[Call] | None"]

CALL_FORMATS: Mapping[str, Tags] = MappingProxyType(
    {
        "json": _tags("<tool_call>", "</tool_call>"),
        "xml": _tags("<tool_call>", "</tool_call>", read_marked_calls),
        "python": _tags("<|tool_call_start|>", "<|tool_call_end|>", read_pythonic_calls),
        "escaped": _tags("<start_function_call>", "<end_function_call>", read_escaped_calls, inner=(_ESCAPE,)),
        "deepseek": _tags(
            "<｜tool▁call▁begin｜>",  # noqa: RUF001
            "<｜tool▁call▁end｜>",  # noqa: RUF001
            read_separated_calls,
            inner=(_SEPARATOR,),
            frame=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),  # noqa: RUF001
        ),
        "mistral": _tags("[TOOL_CALLS]", "", read_named_calls, inner=("[ARGS]", "[CALL_ID]")),
    }
)
"""Formats with tags by name. All read JSON too."""


def write_calls(call_format: str, calls: Sequence[tuple[str, Any]], mark: Callable[[str], str]) -> str:
    """Calls as a model writes them: tags, and marked text between them.

    Args:
        call_format: "python", or any other of CALL_FORMATS, all of which read JSON.
        calls: names and arguments.
        mark: what makes text of the bodies.
    """
    opening, closing = CALL_FORMATS[call_format].tool_call or ("", "")
    if call_format == "python":
        bodies = [f"[{', '.join(write_python_call(name, arguments) for name, arguments in calls)}]"]
    else:
        bodies = [dump_json({"name": name, "arguments": arguments}) for name, arguments in calls]
    space = "\n" if call_format == "json" else ""
    return space.join(f"{opening}{space}{mark(body)}{space}{closing}" for body in bodies)


def write_python_call(name: str, arguments: Any) -> str:
    """`name(key="value")`; arguments that are no object stand as they are."""
    if not isinstance(arguments, dict):
        return f"{name}({arguments})"
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"


def _literal(value: Any) -> str:
    """A JSON value as Python writes it, strings in double quotes."""
    if isinstance(value, str):
        return dump_json(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(item)}' for key, item in value.items())}}}"
    return repr(value)


LISTS = ("python", "mistral")
"""Those in which one pair of tags holds a list of calls."""

HARMONY = "harmony"
"""The format of gpt-oss, in which reasoning and calls are messages with a header."""

BARE_JSON = "bare json"
"""The format without tags: the whole answer is a JSON object, as Llama 3 writes it."""
