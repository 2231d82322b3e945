"""gpt-oss: attention with sinks and biases, windowed in every other layer, and experts packed as MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig, layer_types_of, refuse, require
from resin.models.context import Context
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.experts import ExpertSizes, joined_experts
from resin.models.norm import NormOrder, RMSNorm
from resin.models.routers import Router
from resin.models.sliding import FULL, SLIDING, sliding_groups, sliding_layer
from resin.pallas_kernels.route import RouteRule
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class GptOssConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    layer_types: tuple[str, ...]
    window_tokens: int
    experts: ExpertSizes
    packed: bool  # experts are MXFP4
    gate_limit: float
    gate_alpha: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Reads a config.

        Raises:
            InvalidRequest: a field is missing, or asks for something that this file does not compute.
        """
        refuse(config, "attention_bias", True)
        refuse(config, "hidden_act", "silu")
        layers = require(config, "num_hidden_layers")
        kinds = config.get("layer_types") or [FULL if index % 2 else SLIDING for index in range(layers)]
        defaults = {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "tie_embedding": False,
            "max_position_embeddings": 131_072,
        }
        return cls.read(
            config,
            defaults,
            layer_types=layer_types_of({**config, "layer_types": kinds}, (FULL, SLIDING)),
            window_tokens=require(config, "sliding_window"),
            experts=ExpertSizes(
                experts=require(config, "num_local_experts"),
                top_k=require(config, "num_experts_per_tok", "experts_per_token"),
                hidden=require(config, "hidden_size"),
                width=require(config, "intermediate_size"),
            ),
            packed=(config.get("quantization_config") or {}).get("quant_method") == "mxfp4",
            gate_limit=config.get("swiglu_limit", 7.0),
            gate_alpha=config.get("swiglu_alpha", 1.702),
        )


def clamped_gate(gate: jax.Array, up: jax.Array, *, limit: float, alpha: float) -> jax.Array:
    """`(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit` and up within it on both sides."""
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * gate * jax.nn.sigmoid(alpha * gate)


class GptOssLayer(nnx.Module):
    """`x += attention(norm x)`, then `x += experts(norm x)`."""

    def __init__(self, config: GptOssConfig, placement: Placement, index: int) -> None:
        name, sizes = f"model.layers.{index}", config.experts
        norm = partial(RMSNorm, placement, width=config.hidden, eps=config.norm_eps, order=NormOrder.SCALE_THEN_CAST)
        self.attention_norm = norm(name=f"{name}.input_layernorm")
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            layer=sliding_layer(config, placement, index, scale=config.head_dim**-0.5),
            rope=config.rope,
            bias=True,
            sinks=True,
        )
        self.experts_norm = norm(name=f"{name}.post_attention_layernorm")
        router = Router(
            placement,
            f"{name}.mlp.router",
            rule=RouteRule(sizes.top_k, renormalise=True),
            hidden=sizes.hidden,
            experts=sizes.experts,
            bias=True,
        )
        gate = partial(clamped_gate, limit=config.gate_limit, alpha=config.gate_alpha)
        self.experts = joined_experts(
            placement, f"{name}.mlp.experts", sizes, router=router, gate=gate, packed=config.packed
        )

    def __call__(self, context: Context, x: jax.Array) -> jax.Array:
        x = self.attention(context, x, norm=self.attention_norm, residual=x)
        return self.experts(context, x, norm=self.experts_norm, residual=x)


class GptOss(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = GptOssConfig
    Layer: ClassVar[type[GptOssLayer]] = GptOssLayer
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST

    @staticmethod
    def cache_groups(config: GptOssConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """A History group for the full layers, a Window group for the others."""
        return sliding_groups(config, placement)
