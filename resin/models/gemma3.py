"""Gemma 3, text: five layers that see a window, then one that sees everything; four norms a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig, head_dim_of, layer_types_of, refuse, require, rope_of, with_defaults
from resin.models.context import Context
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.mlp import GatedMLP
from resin.models.norm import NormOrder, RMSNorm
from resin.models.rope import Rope
from resin.models.sliding import FULL, SLIDING, sliding_groups, sliding_layer
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class Gemma3Config(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int
    layer_types: tuple[str, ...]
    window_tokens: int
    sliding_rope: Rope
    query_scalar: float  # scores are divided by its square root
    logit_softcap: float | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Reads a config.

        Raises:
            InvalidRequest: a field is missing, or asks for something that this file does not compute.
        """
        refuse(config, "attention_bias", False)
        refuse(config, "hidden_activation", "gelu_pytorch_tanh")
        refuse(config, "use_bidirectional_attention", False)
        defaults = {
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_embedding": True,
            "max_position_embeddings": 131_072,
        }
        given = with_defaults(config, defaults)
        head_dim = head_dim_of(given)
        local: Mapping[str, Any] = config
        if config.get("rope_parameters") is None:
            # Older files name the windowed layers' frequency apart; only full layers are ever scaled.
            local = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
        return cls.read(
            config,
            defaults,
            ffn=require(config, "intermediate_size"),
            layer_types=_layer_types(config),
            window_tokens=require(config, "sliding_window"),
            rope=rope_of(given, head_dim, FULL),
            sliding_rope=rope_of(local, head_dim, SLIDING),
            query_scalar=config.get("query_pre_attn_scalar", 256),
            logit_softcap=config.get("final_logit_softcapping"),
        )


def _layer_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    if config.get("layer_types") is None:
        pattern = int(require(config, "sliding_window_pattern", "_sliding_window_pattern"))
        kinds = [SLIDING if (index + 1) % pattern else FULL for index in range(require(config, "num_hidden_layers"))]
        config = {**config, "layer_types": kinds}
    return layer_types_of(config, (FULL, SLIDING))


class Gemma3Layer(nnx.Module):
    """`x += norm(attention(norm x))`, then `x += norm(mlp(norm x))`."""

    def __init__(self, config: Gemma3Config, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        norm = partial(RMSNorm, placement, width=config.hidden, eps=config.norm_eps, order=NormOrder.ONE_PLUS)
        self.attention_norm = norm(name=f"{name}.input_layernorm")
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            layer=sliding_layer(config, placement, index, scale=config.query_scalar**-0.5),
            rope=config.rope if config.layer_types[index] == FULL else config.sliding_rope,
            qk_norm_eps=config.norm_eps,
            norm_order=NormOrder.ONE_PLUS,
        )
        self.attention_out_norm = norm(name=f"{name}.post_attention_layernorm")
        self.mlp_norm = norm(name=f"{name}.pre_feedforward_layernorm")
        gelu = partial(jax.nn.gelu, approximate=True)
        self.mlp = GatedMLP(placement, f"{name}.mlp", hidden=config.hidden, width=config.ffn, activation=gelu)
        self.mlp_out_norm = norm(name=f"{name}.post_feedforward_layernorm")

    def __call__(self, context: Context, x: jax.Array) -> jax.Array:
        x = x + self.attention_out_norm(self.attention(context, x, norm=self.attention_norm))
        return x + self.mlp_out_norm(self.mlp(context, x, norm=self.mlp_norm))


class Gemma3(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Gemma3Config
    Layer: ClassVar[type[Gemma3Layer]] = Gemma3Layer
    norm_order: ClassVar[NormOrder] = NormOrder.ONE_PLUS

    def __init__(self, config: Gemma3Config, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embed_scale = config.hidden**0.5
        self.logit_softcap = config.logit_softcap

    @staticmethod
    def cache_groups(config: Gemma3Config, placement: Placement) -> tuple[CacheGroup, ...]:
        """A History group for the full layers, a Window group for the others."""
        return sliding_groups(config, placement)

    def embed(self, context: Context) -> jax.Array:
        """Vectors of the pass's tokens, `[T, hidden]`, scaled by sqrt(hidden) in their own dtype (25.25 for 640)."""
        x = super().embed(context)
        return x * jnp.asarray(self.embed_scale, x.dtype)

    def logits(self, context: Context, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        logits = super().logits(context, hidden)
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * jnp.tanh(logits / self.logit_softcap)
