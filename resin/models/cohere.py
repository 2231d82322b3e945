"""Cohere, Command R: attention and feed-forward beside each other behind one LayerNorm, and scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import MOST_LAYERS, DecoderConfig, head_dim_of, rope_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import EachHeadLayerNorm, LayerNorm, NormOrder, RMSNorm
from resin.models.rope import Rope
from resin.models.sliding import FULL, sliding_groups, sliding_layer
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class CohereConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int
    biases: bool  # of all products of attention
    head_norms: bool
    logit_scale: float
    layer_types: tuple[str, ...]
    window_tokens: int | None  # of sliding layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config.

        Raises:
            InvalidRequest: a field is missing, or asks for something that this file does not compute.
        """
        given = ConfigReader.of(config)
        head_norms = given.flag("use_qk_norm", default=False)
        layer_types = (FULL,) * given.integer("num_hidden_layers", high=MOST_LAYERS)
        return cls.read_cohere(given, 5e5, head_norms=head_norms, layer_types=layer_types, window_tokens=None)

    @classmethod
    def read_cohere(cls, given: ConfigReader, theta: float, **own: Any) -> Self:
        """Builds the Config that `own` completes; `theta` is what an absent `rope_theta` means."""
        given.only("hidden_act", "silu")
        return cls.read(
            given,
            {"tie_word_embeddings": True, "max_position_embeddings": 8192},
            norm_eps=given.number("layer_norm_eps", default=1e-5, low=0),
            rope=rope_of(given, head_dim_of(given), theta=theta, interleaved=True),
            ffn=given.integer("intermediate_size"),
            biases=given.flag("attention_bias", default=False),
            logit_scale=given.number("logit_scale", default=0.0625, above=0, high=1e6),
            **own,
        )


class CohereLayer(nnx.Module):
    """`x += attention(norm x) + mlp(norm x)`."""

    def __init__(self, config: CohereConfig, placement: Placement, index: int) -> None:
        name, order = f"model.layers.{index}", NormOrder.SCALE_THEN_CAST
        self.norm = LayerNorm(placement, f"{name}.input_layernorm", config.hidden, config.norm_eps, order)
        entries, how = sliding_layer(config, placement, index, scale=config.head_dim**-0.5)
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=entries,
            how=how,
            rope=self.rope_of(config, index),
            qk_norm_eps=config.norm_eps if config.head_norms else None,
            heads_norm=EachHeadLayerNorm,
            norm_order=order,
            qkv_bias=config.biases,
            output_bias=config.biases,
        )
        self.mlp = GatedMLP(placement, f"{name}.mlp", hidden=config.hidden, width=config.ffn)

    @staticmethod
    def rope_of(config: CohereConfig, index: int) -> Rope:
        """The rotation of layer `index`."""
        return config.rope

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        normed = self.norm(x)
        return self.mlp(run, normed, residual=self.attention(run, normed, residual=x))


class Cohere(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = CohereConfig
    Layer: ClassVar[type[CohereLayer]] = CohereLayer
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST

    def __init__(self, config: CohereConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.logit_scale = config.logit_scale

    @staticmethod
    def cache_groups(config: CohereConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """A History group for the full layers, a Window group for the others."""
        return sliding_groups(config, placement)

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        return super().logits(run, hidden) * self.logit_scale
