"""OLMo 2: Llama whose norms follow attention and mlp; all query heads share one norm, as do all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import ConfigReader
from resin.models.llama import Llama, LlamaConfig, LlamaLayer
from resin.models.norm import NormOrder


@dataclass(frozen=True, slots=True)
class Olmo2Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        return cls.read_olmo2(ConfigReader.of(config))

    @classmethod
    def read_olmo2(cls, given: ConfigReader, defaults: Mapping[str, Any] | None = None, **own: Any) -> Self:
        """Builds the Config that `own` completes: what every OLMo config shares is read here."""
        given.only("clip_qkv", None)
        return cls.read_llama(given, {"rms_norm_eps": 1e-5, **(defaults or {})}, **own)


class Olmo2Layer(LlamaLayer):
    """`x += norm(attention(x))`, then `x += norm(mlp(x))`."""

    joint_qk_norm: ClassVar[bool] = True
    norms_before: ClassVar[tuple[str, str] | None] = None
    norms_after: ClassVar[tuple[str, str] | None] = ("post_attention_layernorm", "post_feedforward_layernorm")
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST


class Olmo2(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Olmo2Config
    Layer: ClassVar[type[LlamaLayer]] = Olmo2Layer
    norm_order: ClassVar[NormOrder] = NormOrder.SCALE_THEN_CAST
