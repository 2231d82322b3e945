"""Granite 3: Llama whose embeddings, scores, residuals and logits are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax

from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.forward import Pass
from resin.models.llama import Llama, LlamaConfig, LlamaLayer


@dataclass(frozen=True, slots=True)
class GraniteConfig(LlamaConfig):
    """As LlamaConfig, with the factors; logits are divided by theirs."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        return cls.read_granite(ConfigReader.of(config))

    @classmethod
    def read_granite(cls, given: ConfigReader, **own: Any) -> Self:
        """Builds the Config that `own` completes: what every Granite config shares is read here."""
        names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        factors: dict[str, Any] = {name: given.number(name, default=1.0, above=0, high=1e6) for name in names}
        return cls.read_llama(given, **factors, **own)


class GraniteLayer(LlamaLayer):
    """A Llama layer with other scales."""

    def __init__(self, config: Any, placement: Placement, index: int) -> None:
        super().__init__(config, placement, index)
        self.attention.how = replace(self.attention.how, scale=config.attention_multiplier)
        self.residual_scale = config.residual_multiplier


class Granite(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = GraniteConfig
    Layer: ClassVar[type[Any]] = GraniteLayer

    def __init__(self, config: Any, placement: Placement) -> None:
        super().__init__(config, placement)
        self.embedding_scale = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling

    def open(self, run: Pass) -> jax.Array:
        """Vectors of the pass's tokens, `[T, hidden]`."""
        x: jax.Array = super().open(run)
        return x * self.embedding_scale

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        return super().logits(run, hidden) / self.logits_scaling
