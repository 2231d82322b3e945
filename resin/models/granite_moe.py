"""Granite 3 mixture of experts: Granite with routed experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, piled_experts
from resin.models.granite import Granite, GraniteConfig, GraniteLayer
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule


@dataclass(frozen=True, slots=True)
class GraniteMoeConfig(GraniteConfig):
    """As GraniteConfig, with the experts; no layer is without them, and `ffn` is their width."""

    experts: ExpertSizes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        names = ("num_local_experts", "num_experts")
        return cls.read_granite(given, experts=ExpertSizes.read(given, experts=names, width="intermediate_size"))


class GraniteMoeLayer(GraniteLayer):
    """A Granite layer whose feed-forward part is a mixture of experts."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        name, sizes = f"model.layers.{index}.block_sparse_moe", config.experts
        rule = RouteRule(sizes.top_k, renormalise=True)
        router = Router(placement, f"{name}.router.layer", rule=rule, hidden=sizes.hidden, experts=sizes.experts)
        return piled_experts(placement, name, sizes, ("input_linear", "output_linear"), router)


class GraniteMoe(Granite):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = GraniteMoeConfig
    Layer: ClassVar[type[Any]] = GraniteMoeLayer
