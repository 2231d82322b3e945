"""Mixtral: Mistral with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, listed_experts
from resin.models.llama import Llama, LlamaConfig, LlamaLayer, read_windows
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072}


@dataclass(frozen=True, slots=True)
class MixtralConfig(LlamaConfig):
    """As LlamaConfig, with the experts; no layer is without them, and `ffn` is their width."""

    experts: ExpertSizes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        given.ignore("router_jitter_noise")  # of training
        given.only("attention_bias", False)
        return cls.read_llama(
            given,
            DEFAULTS,
            qkv_bias=False,
            output_bias=False,
            experts=ExpertSizes.read(given, experts=("num_local_experts", "num_experts"), width="intermediate_size"),
            **read_windows(given, given.integer("sliding_window", default=None)),
        )


class MixtralLayer(LlamaLayer):
    """A Llama layer whose feed-forward part is a mixture of experts."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        name, sizes = f"model.layers.{index}.block_sparse_moe", config.experts
        rule = RouteRule(sizes.top_k, renormalise=True)
        router = Router(placement, f"{name}.gate", rule=rule, hidden=sizes.hidden, experts=sizes.experts)
        return listed_experts(placement, f"{name}.experts", sizes, ("w1", "w3", "w2"), router)


class Mixtral(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = MixtralConfig
    Layer: ClassVar[type[Any]] = MixtralLayer
