"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and a window on the last layers if asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from resin.models.config_reader import ConfigReader
from resin.models.llama import Llama, LlamaConfig, read_windows


@dataclass(frozen=True, slots=True)
class Qwen2Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        return cls.read_qwen2(ConfigReader.of(config), qkv_bias=True, output_bias=False)

    @classmethod
    def read_qwen2(
        cls,
        given: ConfigReader,
        defaults: Mapping[str, Any] | None = None,
        *,
        has_window: Callable[[int, int], bool] = lambda index, bound: index >= bound,
        **own: Any,
    ) -> Self:
        """Builds the Config that `own` completes: what every Qwen config shares is read here.

        Args:
            given: a Hugging Face config.
            defaults: what the family's absent settings mean.
            has_window: whether layer `index` of a config with windows has one, by `max_window_layers`.
            own: fields that the model's Config adds.
        """
        window, bound = None, 0
        if given.flag("use_sliding_window", default=False):
            window = given.integer("sliding_window", default=None if "sliding_window" in given else 4096)
            bound = given.integer("max_window_layers", default=28, low=0)
        # Published files carry both beside use_sliding_window=false; they mean nothing then.
        given.ignore("sliding_window", "max_window_layers")
        windows = read_windows(given, window, has_window=lambda index: has_window(index, bound))
        return cls.read_llama(given, {"max_position_embeddings": 32_768, **(defaults or {})}, **windows, **own)


class Qwen2(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Qwen2Config
