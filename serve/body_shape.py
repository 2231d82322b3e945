"""A bound on the parts of a body: reading JSON holds the interpreter, and small values take far longer than text."""

from __future__ import annotations

import numpy as np

from serve.errors import ApiError

SMALL_BYTES = 1 << 17
"""Bodies up to this size hold fewer values than any bound."""

MOST_VALUES = 1 << 19
"""Members of lists and objects; 0.2 s to read on a slow core."""

MOST_CONTAINERS = 1 << 17
"""Lists and objects; 0.2 s, most of it the garbage collector's."""


def check_shape(body: bytes, extra: int) -> None:
    """Raises ApiError 413 for JSON of very many small parts; `extra` of them are fine beyond the usual."""
    if len(body) <= SMALL_BYTES:
        return
    # Text may hold such characters too, so these counts are bounds; looking closer takes ten times as long.
    if body.count(b",") <= MOST_VALUES + extra and body.count(b"[") + body.count(b"{") <= MOST_CONTAINERS + extra:
        return
    values, containers = _count(body)
    if values > MOST_VALUES + extra or containers > MOST_CONTAINERS + extra:
        message = (
            f"the body is made of {values} values and {containers} lists and objects; "
            f"this server takes {MOST_VALUES + extra} and {MOST_CONTAINERS + extra}"
        )
        raise ApiError(413, message, code="body_too_large")


def _count(body: bytes) -> tuple[int, int]:
    """Commas, and opening brackets and braces, outside of strings."""
    data = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = ~np.logical_xor.accumulate(data == ord('"'))
    opened = (data == ord("[")) | (data == ord("{"))
    return int(np.count_nonzero((data == ord(",")) & outside)), int(np.count_nonzero(opened & outside))
