"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and Ministral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm
from resin.models.sliding import FULL, SLIDING, read_layer_types, sliding_groups, sliding_layer
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int
    qkv_bias: bool
    output_bias: bool
    layer_types: tuple[str, ...]
    window_tokens: int | None  # of sliding layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config.

        Raises:
            InvalidRequest: a setting is missing or bad, or asks for something that this file does not compute.
        """
        given = ConfigReader.of(config)
        given.only("sliding_window", None)
        return cls.read_llama(given)

    @classmethod
    def read_llama(cls, given: ConfigReader, defaults: Mapping[str, Any] | None = None, **own: Any) -> Self:
        """Builds the Config that `own` completes: what every relative of Llama shares is read here.

        A relative gives in `own` what it decides in another way: `qkv_bias` with `output_bias`, and `layer_types` with
        `window_tokens`.
        """
        given.only("mlp_bias", False)
        given.only("hidden_act", "silu")
        given.only("rope_interleaved", False)
        given.only("is_llama_config", True)
        if "qkv_bias" not in own:
            own["qkv_bias"] = own["output_bias"] = given.flag("attention_bias", default=False)
        if "layer_types" not in own:
            own |= read_windows(given, None)
        llama = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
        return cls.read(given, {**llama, **(defaults or {})}, ffn=given.integer("intermediate_size"), **own)


@dataclass(frozen=True, slots=True)
class MistralConfig(LlamaConfig):
    """As LlamaConfig; an absent window is one of 4096 tokens, null is none, and every layer has it."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        window = given.integer("sliding_window", default=None if "sliding_window" in given else 4096)
        return cls.read_llama(given, {"max_position_embeddings": 131_072}, **read_windows(given, window))


def read_windows(given: ConfigReader, window: int | None, *, first: int = 0) -> dict[str, Any]:
    """`layer_types` and `window_tokens` of layers that see the last `window` tokens.

    Args:
        given: the model's config; its `layer_types` come first.
        window: tokens; None for layers that see everything, and so is one as long as the longest sequence.
        first: layers before this one see everything.

    Raises:
        InvalidRequest: a layer is to have a window, and there is none.
    """
    layer_types = read_layer_types(given, is_full=lambda index: window is None or index < first)
    if window is None and SLIDING in layer_types:
        given.refuse("layer_types", SLIDING, "full_attention alone, as the config turns no sliding_window on")
    if window is not None and window >= given.integer("max_position_embeddings", default=window + 1):
        return {"layer_types": (FULL,) * len(layer_types), "window_tokens": None}
    return {"layer_types": layer_types, "window_tokens": window}


class LlamaLayer(nnx.Module):
    """`x += attention(norm x)`, then `x += mlp(norm x)`."""

    qk_norm: ClassVar[bool] = False

    def __init__(self, config: LlamaConfig, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        eps = config.norm_eps
        self.attention_norm = RMSNorm(placement, f"{name}.input_layernorm", config.hidden, eps)
        entries, how = sliding_layer(config, placement, index, scale=config.head_dim**-0.5)
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=entries,
            how=how,
            rope=config.rope,
            qk_norm_eps=eps if self.qk_norm else None,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
        )
        self.mlp_norm = RMSNorm(placement, f"{name}.post_attention_layernorm", config.hidden, eps)
        self.mlp = self.build_mlp(config, placement, index)

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        return GatedMLP(placement, f"model.layers.{index}.mlp", hidden=config.hidden, width=config.ffn)

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        x = self.attention(run, x, norm=self.attention_norm, residual=x)
        return self.mlp(run, x, norm=self.mlp_norm, residual=x)


class Llama(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    Layer: ClassVar[type[LlamaLayer]] = LlamaLayer

    @staticmethod
    def cache_groups(config: LlamaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """Keys and values: a History group of layers that see everything, a Window group of those that do not."""
        return sliding_groups(config, placement)


class Mistral(Llama):
    """Llama with other defaults."""

    Config: ClassVar[type[LlamaConfig]] = MistralConfig
