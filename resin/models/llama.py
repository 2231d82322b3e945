"""The Llama family: Llama 2 and 3, SmolLM2, Mistral without a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import eos_ids_of, head_dim_of, refuse, require, rope_of
from resin.models.context import AttentionLayer, Context
from resin.models.declare import Placement
from resin.models.mlp import GatedMLP
from resin.models.norm import RMSNorm
from resin.models.rope import Rope
from resin.models.vocabulary import Vocabulary
from resin.plan import CacheGroup, HistoryGroup, Plane


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    tied: bool
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]

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
        head_dim = head_dim_of(config)
        return cls(
            hidden=require(config, "hidden_size"),
            ffn=require(config, "intermediate_size"),
            layers=require(config, "num_hidden_layers"),
            heads=require(config, "num_attention_heads"),
            kv_heads=config.get("num_key_value_heads") or require(config, "num_attention_heads"),
            head_dim=head_dim,
            vocab_size=require(config, "vocab_size"),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope_of(config, head_dim),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_context_tokens=config.get("max_position_embeddings", 2048),
            eos_token_ids=eos_ids_of(config),
        )


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
        self.mlp = GatedMLP(placement, f"{name}.mlp", hidden=config.hidden, width=config.ffn)

    def __call__(self, context: Context, x: jax.Array) -> jax.Array:
        x = x + self.attention(context, self.attention_norm(x))
        return x + self.mlp(context, self.mlp_norm(x))


class Llama(nnx.Module):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    Layer: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: LlamaConfig, placement: Placement) -> None:
        self.vocabulary = Vocabulary(placement, vocab_size=config.vocab_size, hidden=config.hidden, tied=config.tied)
        self.layers = nnx.List([self.Layer(config, placement, index) for index in range(config.layers)])
        self.norm = RMSNorm(placement, "model.norm", config.hidden, config.norm_eps)
        # Endings of checkpoint tensors that need no home: old files store rope frequencies, some store a tied head.
        self.ignored_tensors = ("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tied else ()))

    @staticmethod
    def cache_groups(config: LlamaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """One History group that holds every layer's keys and values."""
        rows = config.layers * 2 * placement.split_kv(config.kv_heads)
        return (HistoryGroup("history", (Plane("kv", rows, config.head_dim),)),)

    def __call__(self, context: Context) -> jax.Array:
        """Final hidden states `[T, hidden]` of the pass's tokens."""
        x = self.vocabulary.embed(context)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                x = layer(context, x)
        return self.norm(x)

    def logits(self, context: Context, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        return self.vocabulary.logits(context, hidden)
