"""EXAONE 4: norms after attention and mlp; where most layers have a window, the others know no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import ConfigReader
from resin.models.llama import Llama, LlamaConfig, LlamaLayer, read_windows
from resin.models.sliding import SLIDING, read_layer_types


@dataclass(frozen=True, slots=True)
class Exaone4Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        given.only("attention_bias", False)
        window = given.integer("sliding_window", default=None if "sliding_window" in given else 4096)
        if window is None or given.get("layer_types") is not None:
            given.ignore("sliding_window_pattern")  # some files say "LLLG" beside the list
            pattern = 1
        else:
            pattern = given.integer("sliding_window_pattern", default=4)
        kinds = read_layer_types(given, is_full=lambda index: (index + 1) % pattern == 0)
        return cls.read_llama(
            given,
            {"rms_norm_eps": 1e-5},
            qkv_bias=False,
            output_bias=False,
            rope_layers=tuple(window is None or kind == SLIDING for kind in kinds),
            **read_windows(given, window, has_window=lambda index: kinds[index] == SLIDING),
        )


class Exaone4Layer(LlamaLayer):
    """`x += norm(attention(x))`, then `x += norm(mlp(x))`, with query and key norms."""

    qk_norm: bool = True
    norms_before: ClassVar[tuple[str, str] | None] = None
    norms_after: ClassVar[tuple[str, str] | None] = ("post_attention_layernorm", "post_feedforward_layernorm")


class Exaone4(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Exaone4Config
    Layer: ClassVar[type[LlamaLayer]] = Exaone4Layer
