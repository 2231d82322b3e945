"""Reading Hugging Face configs: every spelling that published files use for one thing, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from resin.models.rope import Rope
from resin.plan import InvalidRequest


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config in which settings that are absent or null have their defaults."""
    return {**defaults, **{name: value for name, value in config.items() if value is not None}}


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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of one model: what every family's config says. A model's own Config adds its twist.

    Attributes:
        hidden: width of the residual stream.
        layers: their number.
        heads, kv_heads, head_dim: of attention.
        vocab_size: tokens.
        norm_eps: of every norm.
        rope: rotation of queries and keys; of the full layers where others have their own.
        tied: one table embeds tokens and makes logits.
        max_context_tokens: longest sequence.
        eos_token_ids: tokens that end a text.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tied: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], defaults: Mapping[str, Any], **own: Any) -> Self:
        """Builds the Config that `own` completes.

        Args:
            config: a Hugging Face config; null is the same as absent.
            defaults: what the family's absent settings mean, under their names in the config.
            own: fields that the model's Config adds, and common ones that it reads in another way.

        Raises:
            InvalidRequest: a setting is missing.
        """
        given = with_defaults(config, defaults)
        common = {
            "hidden": require(given, "hidden_size"),
            "layers": require(given, "num_hidden_layers"),
            "heads": require(given, "num_attention_heads"),
            "kv_heads": require(given, "num_key_value_heads", "num_attention_heads"),
            "head_dim": head_dim_of(given),
            "vocab_size": require(given, "vocab_size"),
            "norm_eps": require(given, "rms_norm_eps", "norm_eps"),
            "tied": bool(require(given, "tie_word_embeddings", "tie_embedding")),
            "max_context_tokens": require(given, "max_position_embeddings"),
            "eos_token_ids": eos_ids_of(given),
        }
        if "rope" not in own:
            common["rope"] = rope_of(given, common["head_dim"])
        return cls(**{**common, **own})


def fields_of(config: Any) -> dict[str, Any]:
    """The fields of a model's Config, to build that of a model with more of them."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def place_of(layer_types: tuple[str, ...], index: int) -> int:
    """Layers of the same kind before layer `index`: its place in the cache group of its kind."""
    return layer_types[:index].count(layer_types[index])
