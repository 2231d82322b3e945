"""LFM2: gated short convolutions with a few attention layers between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.axes import Axis
from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.config import MOST_LAYERS, DecoderConfig, layer_types_of, place_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder, kv_entries, kv_plane
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm
from resin.models.short_conv import ShortConv
from resin.plan import CacheGroup, HistoryGroup, Plane, StateGroup

ATTENTION, CONV = "full_attention", "conv"
MOST_TAPS = 256
# Settings of published files that neither transformers nor this file reads.
UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
)


@dataclass(frozen=True, slots=True)
class Lfm2Config(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int
    layer_types: tuple[str, ...]
    taps: int  # inputs that the filters see, the current one included

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2Config:
        """Reads a config.

        Raises:
            InvalidRequest: a field is missing, or asks for something that this file does not compute.
        """
        given = ConfigReader.of(config)
        return cls.read_lfm2(given, ffn=_ffn_width(given))

    @classmethod
    def read_lfm2(cls, given: ConfigReader, **own: Any) -> Self:
        """Builds the Config that `own` completes: what dense and mixture-of-experts configs share is read here."""
        given.only("conv_bias", False)
        given.only("block_use_swiglu", True)
        given.only("use_pos_enc", True)
        given.ignore(*UNUSED)
        return cls.read(
            given,
            {"rope_theta": 1e6, "max_position_embeddings": 128_000},
            norm_eps=given.number("norm_eps", default=1e-5, low=0),
            tied=given.flag("tie_embedding", "tie_word_embeddings", default=True),
            layer_types=_layer_types(given),
            taps=given.integer("conv_L_cache", default=3, low=2, high=MOST_TAPS),
            **own,
        )


def _layer_types(given: ConfigReader) -> tuple[str, ...]:
    layers = given.integer("num_hidden_layers", high=MOST_LAYERS)
    attention = given.integers("full_attn_idxs")
    if given.get("layer_types") is None and attention is not None:
        return tuple(ATTENTION if index in attention else CONV for index in range(layers))
    return layer_types_of(given, (ATTENTION, CONV))


def _ffn_width(given: ConfigReader) -> int:
    width = given.integer("block_ff_dim", "intermediate_size")
    multiple = given.integer("block_multiple_of", default=256)
    multiplier = given.number("block_ffn_dim_multiplier", default=1.0, above=0, high=1e3)
    if not given.flag("block_auto_adjust_ff_dim", default=True):
        return width
    adjusted = int(multiplier * int(2 * width / 3))
    return max(-(-adjusted // multiple), 1) * multiple


class Lfm2Layer(nnx.Module):
    """`x += operator(norm x)`, then `x += mlp(norm x)`; the operator is attention or a short convolution."""

    def __init__(self, config: Lfm2Config, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        self.operator_norm = RMSNorm(placement, f"{name}.operator_norm", config.hidden, config.norm_eps)
        self.operator = self._build_operator(config, placement, index)
        self.ffn_norm = RMSNorm(placement, f"{name}.ffn_norm", config.hidden, config.norm_eps)
        self.mlp = self.build_mlp(config, placement, index)

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer; the mixture of experts replaces it."""
        return GatedMLP(
            placement,
            f"model.layers.{index}.feed_forward",
            hidden=config.hidden,
            width=config.ffn,
            names=("w1", "w3", "w2"),
        )

    @staticmethod
    def _build_operator(config: Lfm2Config, placement: Placement, index: int) -> nnx.Module:
        name, place = f"model.layers.{index}", place_of(config.layer_types, index)
        if config.layer_types[index] == CONV:
            width = placement.split("hidden_size", config.hidden, Axis.CHANNELS)
            state = PlaneRef.of_layer("conv", "conv", place, config.taps - 1, width)
            return ShortConv(placement, f"{name}.conv", hidden=config.hidden, state=state)
        return Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=kv_entries(placement, "history", place, config.kv_heads, config.head_dim),
            how=Attend(config.head_dim**-0.5),
            rope=config.rope,
            qk_norm_eps=config.norm_eps,
            names=("out_proj", "q_layernorm", "k_layernorm"),
        )

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        x = self.operator(run, x, norm=self.operator_norm, residual=x)
        return self.mlp(run, x, norm=self.ffn_norm, residual=x)


class Lfm2(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Lfm2Config
    Layer: ClassVar[type[Lfm2Layer]] = Lfm2Layer
    norm_name: ClassVar[str] = "model.embedding_norm"  # the final norm, despite its name

    @staticmethod
    def cache_groups(config: Lfm2Config, placement: Placement) -> tuple[CacheGroup, ...]:
        """Keys and values of the attention layers, and the filters' last inputs."""
        groups: list[CacheGroup] = []
        if attention := config.layer_types.count(ATTENTION):
            plane = kv_plane(placement, attention, config.kv_heads, config.head_dim)
            groups.append(HistoryGroup("history", (plane,)))
        if convs := config.layer_types.count(CONV):
            width = placement.split("hidden_size", config.hidden, Axis.CHANNELS)
            groups.append(StateGroup("conv", (Plane("conv", convs * (config.taps - 1), width),)))
        return tuple(groups)
