"""Tool calls as models write them: JSON objects and Python calls, turned into (name, JSON arguments)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

MAX_NESTING = 128
"""Deepest object or list in what a client or a model says. Templates that walk it take several frames a level."""

T = TypeVar("T")


class Call(NamedTuple):
    """A tool's name and its arguments as JSON text of an object."""

    name: str
    arguments: str


class CallIds:
    """Ids of a response's tool calls, derived from its prompt: repeatable, yet different in every turn."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._seed = np.asarray(prompt_ids, dtype=np.int64).tobytes()

    def id_of(self, index: int) -> str:
        return "call_" + blake2b(self._seed, digest_size=12, salt=index.to_bytes(8, "little")).hexdigest()


def read_json_calls(text: str) -> list[Call] | None:
    """Calls in JSON: an object with `name` and `arguments` (or `parameters`), a list, or several split by `;`.

    Returns:
        None if any part of the text is something else.
    """
    calls: list[Call] = []
    rest = text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        for item in value if isinstance(value, list) else [value]:
            call = _call_of(item)
            if call is None:
                return None
            calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls or None


def ends_within_value(text: str) -> bool:
    """True if a call cut here ends within a value: a string of JSON, or a parameter between tags."""
    body = text.lstrip()
    if body.startswith(("{", "[")):
        return _OPEN_STRING.fullmatch(body) is not None
    return body.rfind("<parameter=") > body.rfind("</parameter>")


# Strings of JSON hold no line break: one that met a break was never closed, and is no reason to read on.
_OPEN_STRING = re.compile(r'(?:[^"]|"(?:[^"\\\n]|\\.)*["\n])*"(?:[^"\\\n]|\\.)*\\?')


def read_python_calls(text: str) -> list[Call] | None:
    """Calls in Python syntax: `[name(key="value", other=[1, 2]), ...]`, brackets optional.

    Returns:
        None if the text is not a list of calls with keyword arguments made of literals.
    """
    try:
        return _PythonCalls(text).read()
    except (ValueError, RecursionError):
        return None


def is_nested_deeper(value: object, limit: int) -> bool:
    """True if objects and lists stand in one another more than `limit` deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        inner = (child for item in level for child in (item.values() if isinstance(item, dict) else item))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def arguments_json(arguments: object) -> str | None:
    """JSON text of an arguments object, or of a string that holds one; None for anything else."""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict) or is_nested_deeper(arguments, MAX_NESTING):
        return None
    try:
        return dump_json(arguments)
    except (ValueError, RecursionError):
        return None


def parsed_arguments(arguments: str) -> Any:
    """The arguments as an object, which templates write in their own way; the text itself if it is no JSON object."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not is_nested_deeper(value, MAX_NESTING) else arguments


def dump_json(value: Any) -> str:
    """JSON as `json.dumps` writes it, characters unescaped wherever UTF-8 can carry them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _call_of(item: object) -> Call | None:
    if not isinstance(item, dict):
        return None
    function: dict[str, Any] = item["function"] if isinstance(item.get("function"), dict) else item
    name = function.get("name")
    arguments = arguments_json(function.get("arguments", function.get("parameters", {})))
    if not isinstance(name, str) or not name or not name.isprintable() or arguments is None:
        return None
    return Call(name, arguments)


_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STRING = re.compile(r"""(?s)"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'""")
_ESCAPE = re.compile(r"(?s)\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5})|(.))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _unescape(match: re.Match[str]) -> str:
    """Python's meaning of a backslash escape; unknown ones keep their backslash, as in Python."""
    digits = match[1] or match[2] or match[3]
    if digits:
        return chr(int(digits, 16))
    return match[4] if match[4] in "\\'\"" else _ESCAPED.get(match[4], match[0])


class _PythonCalls:
    """Recursive descent over call syntax; ValueError where the text leaves it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> list[Call] | None:
        calls = self._until("]" if self._take("[") else "", self._call)
        if not self._done():
            raise ValueError("text after the calls")
        return calls or None

    def _until(self, close: str, read_item: Callable[[], T]) -> list[T]:
        """Items split by commas up to `close` ("": up to the end of the text)."""
        items: list[T] = []
        while not self._ends(close):
            items.append(read_item())
            if not self._take(",") and not self._ends(close, take=False):
                raise ValueError(f"expected , or {close}")
        return items

    def _ends(self, close: str, *, take: bool = True) -> bool:
        if not close:
            return self._done()
        return self._take(close) if take else self._peek(close)

    def _call(self) -> Call:
        name = self._match(_NAME)
        self._expect("(")
        return Call(name, dump_json(dict(self._until(")", self._keyword))))

    def _keyword(self) -> tuple[str, Any]:
        key = self._match(_NAME)
        self._expect("=")
        return key, self._value(0)

    def _pair(self, depth: int) -> tuple[str, Any]:
        key = self._value(depth)
        self._expect(":")
        return key if isinstance(key, str) else json.dumps(key), self._value(depth)

    def _value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise ValueError("nested too deeply")
        for opening, close in ("[]", "()"):
            if self._take(opening):
                return self._until(close, lambda: self._value(depth + 1))
        if self._take("{"):
            return dict(self._until("}", lambda: self._pair(depth + 1)))
        string = _STRING.match(self._text, self._at)
        if string:
            self._at = string.end()
            return _ESCAPE.sub(_unescape, string[1] if string[1] is not None else string[2])
        number = _NUMBER.match(self._text, self._at)
        if number:
            self._at = number.end()
            digits = number.group().replace("_", "")
            return float(digits) if set(digits) & set(".eE") else int(digits)
        word = self._match(_NAME)
        if word not in _WORDS:
            raise ValueError(f"unknown word {word}")
        return _WORDS[word]

    def _peek(self, mark: str) -> bool:
        self._skip()
        return self._text.startswith(mark, self._at)

    def _take(self, mark: str) -> bool:
        taken = self._peek(mark)
        if taken:
            self._at += len(mark)
            self._skip()
        return taken

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise ValueError(f"expected {mark}")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"expected {pattern.pattern}")
        self._at = match.end()
        return match.group()

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()

    def _done(self) -> bool:
        self._skip()
        return self._at >= len(self._text)
