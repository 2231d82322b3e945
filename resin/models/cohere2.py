"""Cohere 2, Command R7B and Command A: windows on three layers of four, and no positions on the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.cohere import Cohere, CohereConfig, CohereLayer
from resin.models.config_reader import REQUIRED, ConfigReader
from resin.models.rope import Rope
from resin.models.sliding import FULL, read_layer_types

# What published files say beside transformers' own settings, and transformers does not read.
FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


@dataclass(frozen=True, slots=True)
class Cohere2Config(CohereConfig):
    """As CohereConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `CohereConfig.from_hf` does."""
        given = ConfigReader.of(config)
        for name, value in FIXED.items():
            given.only(name, value)
        pattern = given.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
        given.only("layer_switch", pattern)
        given.ignore("use_embedding_sharing", "use_parallel_embedding")
        return cls.read_cohere(
            given,
            1e4,
            head_norms=False,
            layer_types=read_layer_types(given, is_full=lambda index: (index + 1) % pattern == 0),
            window_tokens=given.integer("sliding_window", default=REQUIRED if "sliding_window" in given else 4096),
        )


class Cohere2Layer(CohereLayer):
    """A Cohere layer that knows positions if it has a window."""

    @staticmethod
    def rope_of(config: CohereConfig, index: int) -> Rope:
        """The rotation of layer `index`."""
        return Rope.still(config.head_dim) if config.layer_types[index] == FULL else config.rope


class Cohere2(Cohere):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Cohere2Config
    Layer: ClassVar[type[CohereLayer]] = Cohere2Layer
