"""Gemma 2: every other layer sees a window, scores and logits are capped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import ConfigReader
from resin.models.gemma import Gemma, GemmaConfig

DEFAULTS = {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


@dataclass(frozen=True, slots=True)
class Gemma2Config(GemmaConfig):
    """As GemmaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `read_gemma` does."""
        return cls.read_gemma(ConfigReader.of(config), DEFAULTS, is_full=lambda index: index % 2 == 1)


class Gemma2(Gemma):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Gemma2Config
