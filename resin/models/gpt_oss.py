"""gpt-oss: attention with sinks and biases, windowed in every other layer, and experts packed as MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.experts import ExpertSizes, joined_experts
from resin.models.forward import Pass
from resin.models.norm import NormOrder, RMSNorm
from resin.models.routers import Router
from resin.models.sliding import read_layer_types, sliding_groups, sliding_layer
from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.route import RouteRule
from resin.plan import CacheGroup

# What a config without any rotation means.
PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True)
class GptOssConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    quantised_as: ClassVar[tuple[str, ...]] = (*DecoderConfig.quantised_as, "mxfp4")

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
        given = ConfigReader.of(config)
        given.only("attention_bias", True)
        given.only("hidden_act", "silu")
        given.ignore("experts_per_token", "initial_context_length")
        if not given.get("rope_scaling") and not given.get("rope_parameters"):
            given = given.with_values(rope_parameters=PUBLISHED_ROPE)
        quantisation = given.section("quantization_config")
        is_packed = quantisation is not None and quantisation.get("quant_method") == "mxfp4"
        defaults = {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 131_072,
        }
        return cls.read(
            given,
            defaults,
            layer_types=read_layer_types(given, is_full=lambda index: index % 2 == 1),
            window_tokens=given.integer("sliding_window"),
            experts=ExpertSizes.read(given, experts=("num_local_experts", "num_experts"), width="intermediate_size"),
            packed=is_packed,
            gate_limit=given.number("swiglu_limit", default=7.0, above=0, high=1e6),
            gate_alpha=given.number("swiglu_alpha", default=1.702, above=0, high=1e6),
        )


class GptOssLayer(nnx.Module):
    """`x += attention(norm x)`, then `x += experts(norm x)`."""

    def __init__(self, config: GptOssConfig, placement: Placement, index: int) -> None:
        name, sizes = f"model.layers.{index}", config.experts
        norm = partial(RMSNorm, placement, width=config.hidden, eps=config.norm_eps, order=NormOrder.SCALE_THEN_CAST)
        self.attention_norm = norm(name=f"{name}.input_layernorm")
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
            qkv_bias=True,
            output_bias=True,
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
        gate = Gate(alpha=config.gate_alpha, limit=config.gate_limit, up_bias=1.0)
        self.experts = joined_experts(
            placement, f"{name}.mlp.experts", sizes, router=router, gate=gate, packed=config.packed
        )

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        x = self.attention(run, x, norm=self.attention_norm, residual=x)
        return self.experts(run, x, norm=self.experts_norm, residual=x)


class GptOss(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = GptOssConfig
    Layer: ClassVar[type[GptOssLayer]] = GptOssLayer
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST

    @staticmethod
    def cache_groups(config: GptOssConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """A History group for the full layers, a Window group for the others."""
        return sliding_groups(config, placement)
