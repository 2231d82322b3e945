"""What the Gemmas share: four norms a layer, windows on most layers, capped scores and logits, scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig
from resin.models.config_reader import REQUIRED, ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import NormOrder, RMSNorm
from resin.models.residual import add_block
from resin.models.rope import Rope
from resin.models.sliding import read_layer_types, sliding_groups, sliding_layer
from resin.pallas_kernels.gates import Gate
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class GemmaConfig(DecoderConfig):
    """Shape of one model: what every Gemma's config says."""

    ffn: int
    layer_types: tuple[str, ...]
    window_tokens: int
    query_scalar: float  # scores are divided by its square root
    attention_softcap: float | None
    logit_softcap: float | None

    @classmethod
    def read_gemma(
        cls, given: ConfigReader, defaults: Mapping[str, Any], *, is_full: Callable[[int], bool], **own: Any
    ) -> Self:
        """Builds the Config that `own` completes.

        Args:
            given: a Hugging Face config.
            defaults: what the family's absent settings mean, both softcaps among them.
            is_full: whether a layer sees everything where the config does not say so.
            own: fields that the model's Config adds.

        Raises:
            InvalidRequest: a field is missing, or asks for something that is not computed here.
        """
        given.only("attention_bias", False)
        given.only("hidden_activation", "gelu_pytorch_tanh")
        given.only("hidden_act", "gelu_pytorch_tanh")
        gemma = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
        return cls.read(
            given,
            {**gemma, **defaults},
            ffn=given.integer("intermediate_size"),
            layer_types=read_layer_types(given, is_full=is_full),
            window_tokens=given.integer("sliding_window", default=REQUIRED if "sliding_window" in given else 4096),
            query_scalar=given.number("query_pre_attn_scalar", default=256.0, above=0, high=1e6),
            attention_softcap=_softcap(given, "attn_logit_softcapping", defaults),
            logit_softcap=_softcap(given, "final_logit_softcapping", defaults),
            **own,
        )


def _softcap(given: ConfigReader, name: str, defaults: Mapping[str, Any]) -> float | None:
    """Null is no cap, absent the family's."""
    return given.number(name, default=None if name in given else defaults.get(name), above=0, high=1e6)


class GemmaLayer(nnx.Module):
    """`x += norm(attention(norm x))`, then `x += norm(mlp(norm x))`."""

    qk_norm: ClassVar[bool] = False

    def __init__(self, config: GemmaConfig, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        order = NormOrder.SCALE_THEN_CAST
        norm = partial(RMSNorm, placement, width=config.hidden, eps=config.norm_eps, order=order, one_plus=True)
        self.attention_norm = norm(name=f"{name}.input_layernorm")
        entries, how = sliding_layer(
            config, placement, index, scale=config.query_scalar**-0.5, softcap=config.attention_softcap
        )
        self.attention = Attention(
            placement,
            f"{name}.self_attn",
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            entries=entries,
            how=how,
            rope=self.rope_of(config, index),
            qk_norm_eps=config.norm_eps if self.qk_norm else None,
            norm_order=order,
            norm_one_plus=True,
        )
        self.attention_out_norm = norm(name=f"{name}.post_attention_layernorm")
        self.mlp_norm = norm(name=f"{name}.pre_feedforward_layernorm")
        gate = Gate(kind="gelu_tanh")
        self.mlp = GatedMLP(placement, f"{name}.mlp", hidden=config.hidden, width=config.ffn, gate=gate)
        self.mlp_out_norm = norm(name=f"{name}.post_feedforward_layernorm")

    @staticmethod
    def rope_of(config: Any, index: int) -> Rope:
        """The rotation of layer `index`."""
        rope: Rope = config.rope
        return rope

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        x = add_block(run, x, self.attention, before=self.attention_norm, after=self.attention_out_norm)
        return add_block(run, x, self.mlp, before=self.mlp_norm, after=self.mlp_out_norm)


class Gemma(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Layer: ClassVar[type[GemmaLayer]] = GemmaLayer
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST
    norm_one_plus: ClassVar[bool] = True

    def __init__(self, config: GemmaConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embed_scale = config.hidden**0.5
        self.logit_softcap = config.logit_softcap

    @staticmethod
    def cache_groups(config: GemmaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
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
