"""OLMo 3: OLMo 2 with a window on three of four layers; a scaled rotation is that of the others alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config import head_dim_of
from resin.models.config_reader import ConfigReader
from resin.models.llama import read_windows
from resin.models.olmo2 import Olmo2, Olmo2Config, Olmo2Layer
from resin.models.rope import Rope
from resin.models.sliding import FULL, read_layer_types, rotations_of

THETA = 5e5


@dataclass(frozen=True, slots=True)
class Olmo3Config(Olmo2Config):
    """As LlamaConfig, with the rotation of each layer."""

    ropes: tuple[Rope, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        window = given.integer("sliding_window", default=None if "sliding_window" in given else 4096)
        kinds = read_layer_types(given, is_full=_sees_everything)
        full, sliding = rotations_of(
            given, head_dim_of(given), full=("rope_theta", THETA), sliding=(None, THETA), longest=2048
        )
        return cls.read_olmo2(
            given,
            rope=full,
            ropes=tuple(full if kind == FULL else sliding for kind in kinds),
            **read_windows(given, window, has_window=lambda index: not _sees_everything(index)),
        )


def _sees_everything(index: int) -> bool:
    return (index + 1) % 4 == 0


class Olmo3Layer(Olmo2Layer):
    """An OLMo 2 layer with a rotation of its kind."""

    @staticmethod
    def rope_of(config: Any, index: int) -> Rope:
        """The rotation of layer `index`."""
        rope: Rope = config.ropes[index]
        return rope


class Olmo3(Olmo2):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Olmo3Config
    Layer: ClassVar[type[Any]] = Olmo3Layer
