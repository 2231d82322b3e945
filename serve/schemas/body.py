"""JSON bodies to typed requests, with errors that name the field."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec

from resin.recipes.calls import MAX_NESTING, is_nested_deeper
from serve.errors import invalid

T = TypeVar("T", bound=msgspec.Struct)

Hint = Annotated[Any, msgspec.Meta(description="Accepted, and without effect here.")]
"""A field that cannot change what an answer says or promises."""


class JsonObject(dict[str, Any]):
    """Any JSON object, nested no deeper than what walks it can go."""


class Refused:
    """A field that this server does not implement. Null, false and empty values ask for nothing and are fine."""


def schema_of_type(kind: type) -> dict[str, Any]:
    """The JSON Schema of the two types above."""
    if kind is JsonObject:
        return {"type": "object"}
    return {"enum": [False, "", [], {}], "description": "Not supported; only values that ask for nothing are taken."}


_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])?`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_body(data: bytes, kind: type[T]) -> T:
    """The body as a `kind`.

    Raises:
        ApiError: 400 with `param` naming the field (`messages[0].role`) unless the body is no JSON at all.
    """
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        message = str(error)
        place = _PLACE.search(message)
        param = place[1] if place else ""
        missing = _MISSING.search(message)
        if missing:
            param = f"{param}.{missing[1]}".lstrip(".")
        raise invalid(param or None, f"{param}: {_PLACE.sub('', message)}" if param else message) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}") from error


@lru_cache(maxsize=64)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True, dec_hook=_decode_type)


def _decode_type(kind: type, value: object) -> object:
    if kind is Refused:
        if value is False or value in ("", [], {}):
            return Refused()
        raise ValueError("not supported by this server")
    if not isinstance(value, dict):
        raise ValueError("Expected `object`")
    if is_nested_deeper(value, MAX_NESTING):
        raise ValueError(f"Expected `object` nested at most {MAX_NESTING} levels deep")
    return JsonObject(value)
