"""Qwen3 dense: Llama with a norm on each query and key head, and heads as wide as the config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from resin.models.config import fields_of, refuse
from resin.models.llama import Llama, LlamaConfig, LlamaLayer


@dataclass(frozen=True, slots=True)
class Qwen3Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        refuse(config, "use_sliding_window", False)
        # Published files carry window settings beside use_sliding_window=false; they mean nothing then.
        llama = LlamaConfig.from_hf({**config, "sliding_window": None})
        return cls(**fields_of(llama))


class Qwen3Layer(LlamaLayer):
    """A Llama layer with query and key norms."""

    qk_norm: ClassVar[bool] = True


class Qwen3(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Qwen3Config
    Layer: ClassVar[type[LlamaLayer]] = Qwen3Layer
