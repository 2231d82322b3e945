"""Models in which some layers see everything and the others a sliding window: their layers and cache groups."""

from __future__ import annotations

from typing import Protocol

from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.config import place_of
from resin.models.declare import Placement
from resin.models.decoder import kv_entries, kv_plane
from resin.plan import CacheGroup, HistoryGroup, WindowGroup

FULL, SLIDING = "full_attention", "sliding_attention"


class SlidingConfig(Protocol):
    """What these functions read of a model's config; `layer_types` holds FULL and SLIDING."""

    @property
    def layer_types(self) -> tuple[str, ...]: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def window_tokens(self) -> int: ...


def sliding_layer(config: SlidingConfig, placement: Placement, index: int, *, scale: float) -> tuple[PlaneRef, Attend]:
    """Keys and values of layer `index`, and how it attends: full layers use the group "history", others "window"."""
    is_full = config.layer_types[index] == FULL
    place = place_of(config.layer_types, index)
    entries = kv_entries(placement, "history" if is_full else "window", place, config.kv_heads, config.head_dim)
    return entries, Attend(scale, window=None if is_full else config.window_tokens)


def sliding_groups(config: SlidingConfig, placement: Placement) -> tuple[CacheGroup, ...]:
    """Keys and values: all of the full layers', the last `window_tokens` of the others'."""
    groups: list[CacheGroup] = []
    if count := config.layer_types.count(FULL):
        groups.append(HistoryGroup("history", (kv_plane(placement, count, config.kv_heads, config.head_dim),)))
    if count := config.layer_types.count(SLIDING):
        plane = kv_plane(placement, count, config.kv_heads, config.head_dim)
        groups.append(WindowGroup("window", (plane,), config.window_tokens))
    return tuple(groups)
