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
from resin.models.config import MOST_LAYERS, DecoderConfig, head_dim_of, layer_types_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import NormOrder, RMSNorm
from resin.models.rope import Rope
from resin.models.sliding import FULL, SLIDING, sliding_groups, sliding_layer
from resin.pallas_kernels.gates import Gate
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
        given = ConfigReader.of(config)
        given.only("attention_bias", False)
        given.only("hidden_activation", "gelu_pytorch_tanh")
        given.only("attn_logit_softcapping", None)
        head_dim = head_dim_of(given, 256)
        full, sliding = _rotations(given, head_dim)
        return cls.read(
            given,
            {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 131_072},
            ffn=given.integer("intermediate_size"),
            layer_types=_layer_types(given),
            window_tokens=given.integer("sliding_window"),
            rope=full,
            sliding_rope=sliding,
            query_scalar=given.number("query_pre_attn_scalar", default=256.0, above=0, high=1e6),
            logit_softcap=given.number("final_logit_softcapping", default=None, above=0, high=1e6),
        )


def _rotations(given: ConfigReader, head_dim: int) -> tuple[Rope, Rope]:
    """Of full layers and of windowed ones. Older files name the latter's base apart and scale the former alone."""
    given.only("partial_rotary_factor", 1)
    parameters = given.section("rope_parameters") or ConfigReader({})
    full, sliding = (dict(parameters.section(label) or {}) for label in (FULL, SLIDING))
    parameters.refuse_unread("Gemma 3")
    longest = {"original_max_position_embeddings": given.integer("max_position_embeddings", default=131_072)}

    scaling = dict(given.section("rope_scaling") or {})

    def build(base: str, theta: float, values: Mapping[str, Any], path: str) -> Rope:
        theta = given.number(base, default=theta, above=1, high=1e12)
        return Rope.from_parameters(ConfigReader({**longest, "rope_theta": theta, **values}, path=path), head_dim)

    return (
        build("rope_theta", 1e6, {**full, **scaling}, "rope_scaling." if scaling else f"rope_parameters.{FULL}."),
        build("rope_local_base_freq", 1e4, sliding, f"rope_parameters.{SLIDING}."),
    )


def _layer_types(given: ConfigReader) -> tuple[str, ...]:
    pattern = given.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    if given.get("layer_types") is None:
        layers = range(given.integer("num_hidden_layers", high=MOST_LAYERS))
        return tuple(SLIDING if (index + 1) % pattern else FULL for index in layers)
    return layer_types_of(given, (FULL, SLIDING))


class Gemma3Layer(nnx.Module):
    """`x += norm(attention(norm x))`, then `x += norm(mlp(norm x))`."""

    def __init__(self, config: Gemma3Config, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        order = NormOrder.SCALE_THEN_CAST
        norm = partial(RMSNorm, placement, width=config.hidden, eps=config.norm_eps, order=order, one_plus=True)
        self.attention_norm = norm(name=f"{name}.input_layernorm")
        entries, how = sliding_layer(config, placement, index, scale=config.query_scalar**-0.5)
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=entries,
            how=how,
            rope=config.rope if config.layer_types[index] == FULL else config.sliding_rope,
            qk_norm_eps=config.norm_eps,
            norm_order=order,
            norm_one_plus=True,
        )
        self.attention_out_norm = norm(name=f"{name}.post_attention_layernorm")
        self.mlp_norm = norm(name=f"{name}.pre_feedforward_layernorm")
        self.mlp = GatedMLP(
            placement, f"{name}.mlp", hidden=config.hidden, width=config.ffn, gate=Gate(kind="gelu_tanh")
        )
        self.mlp_out_norm = norm(name=f"{name}.post_feedforward_layernorm")

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        x = x + self.attention_out_norm(self.attention(run, x, norm=self.attention_norm))
        return x + self.mlp_out_norm(self.mlp(run, x, norm=self.mlp_norm))


class Gemma3(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Gemma3Config
    Layer: ClassVar[type[Gemma3Layer]] = Gemma3Layer
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST
    norm_one_plus: ClassVar[bool] = True

    def __init__(self, config: Gemma3Config, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embed_scale = config.hidden**0.5
        self.logit_softcap = config.logit_softcap

    @staticmethod
    def cache_groups(config: Gemma3Config, placement: Placement) -> tuple[CacheGroup, ...]:
        """A History group for the full layers, a Window group for the others."""
        return sliding_groups(config, placement)

    def open(self, run: Pass) -> jax.Array:
        """Vectors of the pass's tokens, `[T, hidden]`, scaled by sqrt(hidden) in their own dtype (25.25 for 640)."""
        x: jax.Array = super().open(run)
        return x * jnp.asarray(self.embed_scale, x.dtype)

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        logits = super().logits(run, hidden)
        if self.logit_softcap is None:
            return logits
        return self.logit_softcap * jnp.tanh(logits / self.logit_softcap)
