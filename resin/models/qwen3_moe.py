"""Qwen3 mixture of experts: Qwen3 with routed experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes
from resin.models.qwen2_moe import build_experts, read_experts
from resin.models.qwen3 import Qwen3, Qwen3Config, Qwen3Layer


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(Qwen3Config):
    """As LlamaConfig, with the experts; `ffn` is the width of layers without them."""

    experts: ExpertSizes
    expert_layers: tuple[bool, ...]
    renormalise: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        return cls.read_qwen3(given, **read_experts(given))


class Qwen3MoeLayer(Qwen3Layer):
    """A Qwen3 layer whose feed-forward part may be a mixture of experts."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        if not config.expert_layers[index]:
            return Qwen3Layer.build_mlp(config, placement, index)
        return build_experts(config, placement, f"model.layers.{index}.mlp")


class Qwen3Moe(Qwen3):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Qwen3MoeConfig
    Layer: ClassVar[type[Any]] = Qwen3MoeLayer
