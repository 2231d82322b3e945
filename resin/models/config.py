"""Reading Hugging Face configs: every spelling that published files use for one thing, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from resin.models.rope import Rope
from resin.plan import InvalidRequest


def require(config: Mapping[str, Any], *names: str) -> Any:
    """The first of several spellings that is present and not null.

    Raises:
        InvalidRequest: none is.
    """
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise InvalidRequest(names[0], None, "a value in the model's config")


def refuse(config: Mapping[str, Any], name: str, supported: Any) -> None:
    """Raises InvalidRequest if a setting is present with another value than the supported one."""
    if config.get(name) not in (None, supported):
        raise InvalidRequest(name, config[name], f"{supported!r}, the only value that this model file computes")


def head_dim_of(config: Mapping[str, Any]) -> int:
    """`head_dim`, or the hidden size shared evenly over the heads."""
    if config.get("head_dim") is not None:
        return int(config["head_dim"])
    hidden, heads = int(require(config, "hidden_size")), int(require(config, "num_attention_heads"))
    if hidden % heads:
        raise InvalidRequest("num_attention_heads", heads, f"a divisor of hidden_size={hidden}, or head_dim given")
    return hidden // heads


def eos_ids_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, which is a number, a list or absent."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list | tuple) else (int(value),)


def rope_of(config: Mapping[str, Any], width: int, label: str | None = None) -> Rope:
    """The rotation that a config describes.

    Reads `rope_parameters` (one dict, or one a label such as "full_attention"), else `rope_theta` with `rope_scaling`
    (its kind under `rope_type` or `type`).

    Args:
        config: the model's config.
        width: head size that the rotation acts on.
        label: which of several rotations.

    Raises:
        InvalidRequest: the scaling is of an unknown kind or lacks a field.
    """
    given = config.get("rope_parameters")
    if given is not None and label is not None and label in given:
        given = given[label]
    if given is None:
        given = dict(config.get("rope_scaling") or {})
    given = dict(given)
    given.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    given.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if given["original_max_position_embeddings"] is None:
        given["original_max_position_embeddings"] = config.get("max_position_embeddings")
    return Rope.from_parameters(given, width)


def layer_types_of(config: Mapping[str, Any], known: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one of the known kinds for each of `num_hidden_layers`.

    Raises:
        InvalidRequest: absent, of another length, or with an unknown kind.
    """
    layers, kinds = require(config, "num_hidden_layers"), require(config, "layer_types")
    if len(kinds) != layers or not set(kinds) <= set(known):
        raise InvalidRequest("layer_types", kinds, f"{layers} of {list(known)}")
    return tuple(kinds)


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a model's Config, to build that of a model with more of them."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def place_of(layer_types: tuple[str, ...], index: int) -> int:
    """Layers of the same kind before layer `index`: its place in the cache group of its kind."""
    return layer_types[:index].count(layer_types[index])
