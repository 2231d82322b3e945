"""JSON bodies to typed requests, with errors that name the field."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from serve.errors import invalid

T = TypeVar("T", bound=msgspec.Struct)

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
    return msgspec.json.Decoder(kind, strict=True)
