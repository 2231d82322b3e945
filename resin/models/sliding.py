"""Models in which some layers see everything and the others a sliding window: their layers and cache groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.config import MOST_LAYERS, layer_types_of, place_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import kv_entries, kv_plane
from resin.models.rope import Rope
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
    def window_tokens(self) -> int | None: ...


def read_layer_types(given: ConfigReader, *, is_full: Callable[[int], bool]) -> tuple[str, ...]:
    """FULL or SLIDING for each layer: `layer_types`, else as the family places them.

    Args:
        given: the model's config.
        is_full: whether a layer sees everything where the config does not say so.

    Raises:
        InvalidRequest: of another length, or with another kind.
    """
    if given.get("layer_types") is not None:
        return layer_types_of(given, (FULL, SLIDING))
    layers = range(given.integer("num_hidden_layers", high=MOST_LAYERS))
    return tuple(FULL if is_full(index) else SLIDING for index in layers)


def rotations_of(
    given: ConfigReader, width: int, *, full: tuple[str, float], sliding: tuple[str | None, float], longest: int
) -> tuple[Rope, Rope]:
    """Rotations of full layers and of windowed ones, from `rope_parameters` by kind of layer.

    Older files have the bases beside it, and scale the full layers alone, by `rope_scaling`.

    Args:
        given: the model's config.
        width: head size.
        full, sliding: name of the base beside it, None for none, and what an absent one means.
        longest: what an absent `max_position_embeddings` means.

    Raises:
        InvalidRequest: a rotation is of an unknown kind, or a setting of it is missing, bad or unknown.
    """
    parameters = given.section("rope_parameters") or ConfigReader({})
    kinds = {label: dict(parameters.section(label) or {}) for label in (FULL, SLIDING)}
    parameters.refuse_unread("a model with a rotation for each kind of layer")
    scaling = dict(given.section("rope_scaling") or {})
    length = {"original_max_position_embeddings": given.integer("max_position_embeddings", default=longest)}

    def build(base: tuple[str | None, float], values: Mapping[str, Any], path: str) -> Rope:
        name, theta = base
        theta = theta if name is None else given.number(name, default=theta, above=1, high=1e12)
        return Rope.from_parameters(ConfigReader({**length, "rope_theta": theta, **values}, path=path), width)

    return (
        build(full, {**kinds[FULL], **scaling}, "rope_scaling." if scaling else f"rope_parameters.{FULL}."),
        build(sliding, kinds[SLIDING], f"rope_parameters.{SLIDING}."),
    )


def sliding_layer(
    config: SlidingConfig, placement: Placement, index: int, *, scale: float, softcap: float | None = None
) -> tuple[PlaneRef, Attend]:
    """Keys and values of layer `index`, and how it attends: full layers use the group "history", others "window"."""
    is_full = config.layer_types[index] == FULL
    place = place_of(config.layer_types, index)
    entries = kv_entries(placement, "history" if is_full else "window", place, config.kv_heads, config.head_dim)
    return entries, Attend(scale, window=None if is_full else config.window_tokens, softcap=softcap)


def sliding_groups(config: SlidingConfig, placement: Placement) -> tuple[CacheGroup, ...]:
    """Keys and values: all of the full layers', the last `window_tokens` of the others'."""
    groups: list[CacheGroup] = []
    if count := config.layer_types.count(FULL):
        groups.append(HistoryGroup("history", (kv_plane(placement, count, config.kv_heads, config.head_dim),)))
    if count := config.layer_types.count(SLIDING):
        assert config.window_tokens is not None
        plane = kv_plane(placement, count, config.kv_heads, config.head_dim)
        groups.append(WindowGroup("window", (plane,), config.window_tokens))
    return tuple(groups)
