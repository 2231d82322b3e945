"""Gemma 3, text: five layers that see a window, then one that sees everything, and a rotation for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config import head_dim_of
from resin.models.config_reader import ConfigReader
from resin.models.gemma import Gemma, GemmaConfig, GemmaLayer
from resin.models.rope import Rope
from resin.models.sliding import FULL, rotations_of


@dataclass(frozen=True, slots=True)
class Gemma3Config(GemmaConfig):
    """As GemmaConfig, with the rotation of the layers that see a window."""

    sliding_rope: Rope

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `read_gemma` does."""
        given = ConfigReader.of(config)
        given.only("attn_logit_softcapping", None)  # transformers reads it and leaves scores as they are
        given.only("partial_rotary_factor", 1)
        # Older files name the base of windowed layers apart.
        theta, local = ("rope_theta", 1e6), ("rope_local_base_freq", 1e4)
        full, sliding = rotations_of(given, head_dim_of(given, 256), full=theta, sliding=local, longest=131_072)
        pattern = given.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        return cls.read_gemma(
            given,
            {"max_position_embeddings": 131_072},
            is_full=lambda index: (index + 1) % pattern == 0,
            rope=full,
            sliding_rope=sliding,
        )


class Gemma3Layer(GemmaLayer):
    """A Gemma layer with query and key norms, and a rotation of its kind."""

    qk_norm: ClassVar[bool] = True

    @staticmethod
    def rope_of(config: Gemma3Config, index: int) -> Rope:
        """The rotation of layer `index`."""
        return config.rope if config.layer_types[index] == FULL else config.sliding_rope


class Gemma3(Gemma):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Gemma3Config
    Layer: ClassVar[type[GemmaLayer]] = Gemma3Layer
