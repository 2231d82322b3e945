"""GLM-4, of both generations: half of each head turns, in neighbouring pairs; the newer one has four norms a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config import head_dim_of, rope_of
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.llama import Llama, LlamaConfig, LlamaLayer
from resin.models.mlp import FUSED, GatedMLP

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072}
EOS = (151_329, 151_336, 151_338)


@dataclass(frozen=True, slots=True)
class GlmConfig(LlamaConfig):
    """As LlamaConfig."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        if given.get("eos_token_id") is None:
            given = given.with_values(eos_token_id=EOS)
        return cls.read_llama(
            given,
            DEFAULTS,
            qkv_bias=given.flag("attention_bias", default=True),
            output_bias=False,
            rope=rope_of(given, head_dim_of(given, DEFAULTS["head_dim"]), partial=0.5, interleaved=True),
        )


class GlmLayer(LlamaLayer):
    """A Llama layer that stores gate and up as one matrix."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        return GatedMLP(placement, f"model.layers.{index}.mlp", hidden=config.hidden, width=config.ffn, names=FUSED)


class Glm4Layer(GlmLayer):
    """`x += norm(attention(norm x))`, then `x += norm(mlp(norm x))`."""

    norms_after: ClassVar[tuple[str, str] | None] = ("post_self_attn_layernorm", "post_mlp_layernorm")


class Glm(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = GlmConfig
    Layer: ClassVar[type[Any]] = GlmLayer


class Glm4(Glm):
    """The same with norms after each block as well."""

    Layer: ClassVar[type[Any]] = Glm4Layer
