"""SmolLM3: Llama without positions in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config import MOST_LAYERS
from resin.models.config_reader import ConfigReader
from resin.models.llama import Llama, LlamaConfig, read_windows

DEFAULTS = {"rope_theta": 2e6, "tie_word_embeddings": True, "max_position_embeddings": 32_768}


@dataclass(frozen=True, slots=True)
class SmolLM3Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        rope_layers = _rope_layers(given)
        use_window = given.flag("use_sliding_window", default=False)
        window = given.integer("sliding_window", default=None) if use_window else None
        given.ignore("sliding_window", "max_window_layers")  # the first means nothing alone, the second nothing at all
        windows = read_windows(given, window, has_window=lambda index: not rope_layers[index])
        return cls.read_llama(given, DEFAULTS, rope_layers=rope_layers, **windows)


def _rope_layers(given: ConfigReader) -> tuple[bool, ...]:
    """Of each layer: `no_rope_layers` says 1 for one that does rotate, despite its name."""
    layers = given.integer("num_hidden_layers", high=MOST_LAYERS)
    interval = given.integer("no_rope_layer_interval", default=4)
    flags = given.integers("no_rope_layers", high=1)
    if flags is None:
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if len(flags) < layers:
        given.refuse("no_rope_layers", list(flags), f"0 or 1 for each of num_hidden_layers={layers}")
    return tuple(map(bool, flags[:layers]))


class SmolLM3(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = SmolLM3Config
