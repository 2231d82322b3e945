"""Phi-3, Phi-3.5 and Phi-4: Llama with fused products, windows on every layer, and LongRoPE where contexts are long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.llama import Llama, LlamaConfig, LlamaLayer, read_windows
from resin.models.mlp import FUSED, GatedMLP

OTHER_NAMES_OF_LONGROPE = ("su", "yarn")  # Phi-3 files of before it had one


@dataclass(frozen=True, slots=True)
class Phi3Config(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = _with_rotation(ConfigReader.of(config))
        defaults = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
        given.only("attention_bias", False)
        given.only("lm_head_bias", False)
        given.only("full_attn_mod", 1)
        given.only("interpolate_factor", 1)
        windows = read_windows(given, given.integer("sliding_window", default=None))
        return cls.read_llama(given, defaults, **windows)


def _with_rotation(given: ConfigReader) -> ConfigReader:
    """The config with its rotation's kind under its name, and both lengths that it goes by."""
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    values: dict[str, Any] = {name: given.integer(name, default=4096) for name in lengths}
    for name in ("rope_scaling", "rope_parameters"):
        section = given.section(name)
        if section is not None and section.get("rope_type", section.get("type")) in OTHER_NAMES_OF_LONGROPE:
            values[name] = {**section, "rope_type": "longrope"}
    return given.with_values(**values)


class Phi3Layer(LlamaLayer):
    """A Llama layer that stores queries, keys and values as one matrix, and gate and up as one."""

    qkv_names: ClassVar[tuple[str, ...]] = ("qkv_proj",)

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        return GatedMLP(placement, f"model.layers.{index}.mlp", hidden=config.hidden, width=config.ffn, names=FUSED)


class Phi3(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[LlamaConfig]] = Phi3Config
    Layer: ClassVar[type[LlamaLayer]] = Phi3Layer
