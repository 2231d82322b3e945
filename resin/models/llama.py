"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.cache.protocol import Attend
from resin.models.config import DecoderConfig, layer_types_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder, kv_entries, kv_plane
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm
from resin.plan import CacheGroup, HistoryGroup


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int

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
        """Builds the Config that `own` completes: what every relative of Llama shares is read here."""
        given.only("attention_bias", False)
        given.only("mlp_bias", False)
        given.only("hidden_act", "silu")
        given.only("rope_interleaved", False)
        given.only("is_llama_config", True)
        if given.get("layer_types") is not None:
            layer_types_of(given, ("full_attention",))
        llama = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
        return cls.read(given, {**llama, **(defaults or {})}, ffn=given.integer("intermediate_size"), **own)


@dataclass(frozen=True, slots=True)
class MistralConfig(LlamaConfig):
    """As LlamaConfig; an absent window is one of 4096 tokens, null is none."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        longest = given.integer("max_position_embeddings", default=131_072)
        window = given.integer("sliding_window", default=None) if "sliding_window" in given else 4096
        if window is not None and window < longest:
            given.refuse("sliding_window", window, f"null, or at least max_position_embeddings={longest}")
        return cls.read_llama(given, {"max_position_embeddings": 131_072})


class LlamaLayer(nnx.Module):
    """`x += attention(norm x)`, then `x += mlp(norm x)`."""

    qk_norm: ClassVar[bool] = False

    def __init__(self, config: LlamaConfig, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        eps = config.norm_eps
        self.attention_norm = RMSNorm(placement, f"{name}.input_layernorm", config.hidden, eps)
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=kv_entries(placement, "history", index, config.kv_heads, config.head_dim),
            how=Attend(config.head_dim**-0.5),
            rope=config.rope,
            qk_norm_eps=eps if self.qk_norm else None,
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
        """One History group that holds every layer's keys and values."""
        return (HistoryGroup("history", (kv_plane(placement, config.layers, config.kv_heads, config.head_dim),)),)


class Mistral(Llama):
    """Llama with other defaults."""

    Config: ClassVar[type[LlamaConfig]] = MistralConfig
