"""The Llama family: Llama 2 and 3, SmolLM2, Mistral and Ministral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from resin.models.attention import Attention
from resin.models.config import DecoderConfig
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.decoder import Decoder
from resin.models.forward import Pass
from resin.models.mlp import GatedMLP
from resin.models.norm import JointHeadNorm, NormOrder, RMSNorm
from resin.models.residual import add_block
from resin.models.rope import Rope
from resin.models.sliding import FULL, SLIDING, read_layer_types, sliding_groups, sliding_layer
from resin.plan import CacheGroup


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Shape of one model. `from_hf` reads it from a Hugging Face config."""

    ffn: int
    qkv_bias: bool
    output_bias: bool
    layer_types: tuple[str, ...]
    window_tokens: int | None  # of sliding layers
    rope_layers: tuple[bool, ...] | None  # which know positions; None for all

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
    def read_llama(
        cls,
        given: ConfigReader,
        defaults: Mapping[str, Any] | None = None,
        *,
        activation: str = "silu",
        **own: Any,
    ) -> Self:
        """Builds the Config that `own` completes: what every relative of Llama shares is read here.

        A relative gives in `own` what it decides in another way: `qkv_bias` with `output_bias`, `layer_types` with
        `window_tokens`, and `rope_layers`. `activation` is the only one that its feed-forward layer computes.
        """
        given.only("mlp_bias", False)
        given.only("hidden_act", activation)
        given.only("rope_interleaved", False)
        given.only("is_llama_config", True)
        if "qkv_bias" not in own:
            own["qkv_bias"] = own["output_bias"] = given.flag("attention_bias", default=False)
        own.setdefault("rope_layers", None)
        if "layer_types" not in own:
            own |= read_windows(given, None)
        llama = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
        return cls.read(given, {**llama, **(defaults or {})}, ffn=given.integer("intermediate_size"), **own)


@dataclass(frozen=True, slots=True)
class MistralConfig(LlamaConfig):
    """As LlamaConfig; an absent window is one of 4096 tokens, null is none, and every layer has it."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        window = given.integer("sliding_window", default=None if "sliding_window" in given else 4096)
        return cls.read_llama(given, {"max_position_embeddings": 131_072}, **read_windows(given, window))


def read_windows(
    given: ConfigReader, window: int | None, *, has_window: Callable[[int], bool] = lambda index: True
) -> dict[str, Any]:
    """`layer_types` and `window_tokens` of layers that see the last `window` tokens.

    Args:
        given: the model's config; its `layer_types` come first.
        window: tokens; None for layers that see everything, and so is one as long as the longest sequence.
        has_window: which layers have one where the config does not say so.

    Raises:
        InvalidRequest: a layer is to have a window, and there is none.
    """
    layer_types = read_layer_types(given, is_full=lambda index: window is None or not has_window(index))
    if window is None and SLIDING in layer_types:
        given.refuse("layer_types", SLIDING, "full_attention alone, as the config turns no sliding_window on")
    if window is not None and window >= given.integer("max_position_embeddings", default=window + 1):
        return {"layer_types": (FULL,) * len(layer_types), "window_tokens": None}
    return {"layer_types": layer_types, "window_tokens": window}


class LlamaLayer(nnx.Module):
    """`x += attention(norm x)`, then `x += mlp(norm x)`.

    What a relative's layer does otherwise it says in these, or by a method of its own:

    Attributes:
        qk_norm: normalise each query and key head.
        joint_qk_norm: normalise all query heads of a token at once, and all key heads.
        norms_before, norms_after: checkpoint names of the norms of what attention and mlp take, and of what they give.
        norm_order: of all of these norms.
        qkv_names: checkpoint names of the products of queries, keys and values, or of one that is all three.
        residual_scale: factor on what attention and mlp give.
    """

    qk_norm: bool = False
    joint_qk_norm: ClassVar[bool] = False
    norms_before: ClassVar[tuple[str, str] | None] = ("input_layernorm", "post_attention_layernorm")
    norms_after: ClassVar[tuple[str, str] | None] = None
    norm_order: ClassVar[NormOrder] = NormOrder.CAST_THEN_SCALE
    qkv_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, placement: Placement, index: int) -> None:
        name = f"model.layers.{index}"
        eps = config.norm_eps

        def norm(names: tuple[str, str] | None, place: int) -> RMSNorm | None:
            if names is None:
                return None
            return RMSNorm(placement, f"{name}.{names[place]}", config.hidden, eps, self.norm_order)

        self.attention_norm, self.mlp_norm = (norm(self.norms_before, place) for place in (0, 1))
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
            qk_norm_eps=eps if self.qk_norm or self.joint_qk_norm else None,
            heads_norm=JointHeadNorm if self.joint_qk_norm else None,
            norm_order=self.norm_order,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            inputs=self.qkv_names,
        )
        self.mlp = self.build_mlp(config, placement, index)
        self.attention_out_norm, self.mlp_out_norm = (norm(self.norms_after, place) for place in (0, 1))
        self.residual_scale = 1.0

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        return GatedMLP(placement, f"model.layers.{index}.mlp", hidden=config.hidden, width=config.ffn)

    @staticmethod
    def rope_of(config: Any, index: int) -> Rope:
        """The rotation of layer `index`."""
        turns = config.rope_layers is None or config.rope_layers[index]
        return config.rope if turns else Rope.still(config.head_dim)

    def __call__(self, run: Pass, x: jax.Array) -> jax.Array:
        scale = self.residual_scale
        x = add_block(run, x, self.attention, before=self.attention_norm, after=self.attention_out_norm, scale=scale)
        return add_block(run, x, self.mlp, before=self.mlp_norm, after=self.mlp_out_norm, scale=scale)


class Llama(Decoder):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    Layer: ClassVar[type[LlamaLayer]] = LlamaLayer

    @staticmethod
    def cache_groups(config: LlamaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        """Keys and values: a History group of layers that see everything, a Window group of those that do not."""
        return sliding_groups(config, placement)


class Mistral(Llama):
    """Llama with other defaults."""

    Config: ClassVar[type[LlamaConfig]] = MistralConfig
