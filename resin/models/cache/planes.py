"""Where a group's planes lie in the pages of the arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from resin.plan import CacheGroup, GroupGeometry, InvalidRequest, StateGroup
from resin.plan.cache import FP8_DTYPE


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """Where a plane lies in a page, counted in vectors of its width.

    Attributes:
        rows_per_page: vectors a page.
        first_row: vectors before the plane.
        page_entries: entries a page, the stride between two rows of the plane.
        fp8_scale: of 8-bit floats; None if the values are the arena's own.
    """

    rows_per_page: int
    first_row: int
    page_entries: int
    fp8_scale: float | None = None


def plane_rows(group: CacheGroup, fill: GroupGeometry, plane_name: str, arena: jax.Array) -> PlaneRows:
    """Where a plane of a History or Window group lies.

    Raises:
        InvalidRequest: the group is a State, or has no such plane.
    """
    if isinstance(group, StateGroup):
        raise InvalidRequest("group", group.name, "a History or Window group")
    before = first_row(group, fill.page_entries, plane_name, arena.dtype)
    plane = next(plane for plane in group.planes if plane.name == plane_name)
    itemsize = jnp.dtype(arena.dtype).itemsize
    return PlaneRows(
        rows_per_page=arena.shape[1] * itemsize // plane.vector_bytes(str(arena.dtype)),
        first_row=before,
        page_entries=fill.page_entries,
        fp8_scale=plane.scale if plane.dtype == FP8_DTYPE else None,
    )


def check_plane(group: CacheGroup, plane_name: str, *, rows: int, width: int) -> None:
    """Holds a group's plane against what a layer keeps in it.

    Raises:
        InvalidRequest: no such plane, too few vectors an entry, or vectors of another width.
    """
    for plane in group.planes:
        if plane.name == plane_name and (plane.rows < rows or plane.width != width):
            held = f"{plane.rows} rows of {plane.width} in group {group.name!r}"
            raise InvalidRequest(f"plane {plane_name!r}", held, f"at least {rows} rows of {width} for its layers")


def first_row(group: CacheGroup, entries: int, plane_name: str, arena_dtype: Any) -> int:
    """Vectors of a plane's size that the planes before it take."""
    before = 0
    for plane in group.planes:
        if plane.name == plane_name:
            return before // plane.vector_bytes(str(arena_dtype))
        before += entries * plane.bytes_per_entry(str(arena_dtype))
    raise InvalidRequest("plane", plane_name, f"one of {[plane.name for plane in group.planes]}")
