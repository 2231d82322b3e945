"""Qwen3 dense: Llama with a norm on each query and key head, and heads as wide as the config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import ConfigReader
from resin.models.llama import Llama, LlamaConfig, LlamaLayer
from resin.models.qwen2 import Qwen2Config


@dataclass(frozen=True, slots=True)
class Qwen3Config(Qwen2Config):
    """As Qwen2Config; heads are 128 wide unless it says otherwise."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        return cls.read_qwen3(ConfigReader.of(config), {"head_dim": 128})

    @classmethod
    def read_qwen3(cls, given: ConfigReader, defaults: Mapping[str, Any] | None = None, **own: Any) -> Self:
        """Builds the Config that `own` completes: what dense and mixture-of-experts configs share is read here."""
        given.only("use_qk_norm", True)
        given.only("qkv_bias", False)
        given.only("shared_expert_intermediate_size", 0)
        return cls.read_qwen2(given, defaults, **own)


class Qwen3Layer(LlamaLayer):
    """A Llama layer with query and key norms."""

    qk_norm: bool = True


class Qwen3(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Qwen3Config
    Layer: ClassVar[type[LlamaLayer]] = Qwen3Layer
