"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig, refuse, require
from resin.models.context import AttentionLayer, Context
from resin.models.declare import Placement
from resin.models.decoder import Decoder, kv_plane
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm
from resin.plan import CacheGroup, HistoryGroup


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a config.

        Raises:
            InvalidRequest: a field is missing, or asks for something that this file does not compute.
        """
        refuse(config, "attention_bias", False)
        refuse(config, "mlp_bias", False)
        refuse(config, "hidden_act", "silu")
        refuse(config, "sliding_window", None)
        defaults = {"rms_norm_eps": 1e-6, "tie_embedding": False, "max_position_embeddings": 2048}
        return cls.read(config, defaults, ffn=require(config, "intermediate_size"))


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
            layer=AttentionLayer(
                group="history",
                index=index,
                kv_heads=placement.split_kv(config.kv_heads),
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
            ),
            rope=config.rope,
            qk_norm_eps=eps if self.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(placement, f"{name}.post_attention_layernorm", config.hidden, eps)
        self.mlp = self.build_mlp(config, placement, index)

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        return GatedMLP(placement, f"model.layers.{index}.mlp", hidden=config.hidden, width=config.ffn)

    def __call__(self, context: Context, x: jax.Array) -> jax.Array:
        x = self.attention(context, x, norm=self.attention_norm, residual=x)
        return self.mlp(context, x, norm=self.mlp_norm, residual=x)


class Llama(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    Layer: ClassVar[type[LlamaLayer]] = LlamaLayer

    @staticmethod
    def cache_groups(config: LlamaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """One History group that holds every layer's keys and values."""
        return (HistoryGroup("history", (kv_plane(placement, config.layers, config.kv_heads, config.head_dim),)),)
