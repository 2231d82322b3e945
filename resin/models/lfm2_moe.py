"""LFM2 mixture of experts: LFM2 with routed experts after the first few layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from resin.models.config import require
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, listed_experts
from resin.models.lfm2 import Lfm2, Lfm2Config, Lfm2Layer
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule


@dataclass(frozen=True, slots=True)
class Lfm2MoeConfig(Lfm2Config):
    """As Lfm2Config, with the experts; `ffn` is the width of the first `dense_layers`, which have none."""

    experts: ExpertSizes
    dense_layers: int
    has_selection_bias: bool
    renormalise: bool
    scaling: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Lfm2MoeConfig:
        """Reads a config; raises InvalidRequest as `Lfm2Config.from_hf` does."""
        return cls.read_lfm2(
            config,
            ffn=require(config, "intermediate_size"),
            experts=ExpertSizes(
                experts=require(config, "num_experts", "num_local_experts"),
                top_k=require(config, "num_experts_per_tok"),
                hidden=require(config, "hidden_size"),
                width=require(config, "moe_intermediate_size"),
            ),
            dense_layers=config.get("num_dense_layers", 2),
            has_selection_bias=bool(config.get("use_expert_bias", True)),
            renormalise=bool(config.get("norm_topk_prob", True)),
            scaling=float(config.get("routed_scaling_factor", 1.0)),
        )


class Lfm2MoeLayer(Lfm2Layer):
    """An LFM2 layer whose feed-forward part may be a mixture of experts."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        if index < config.dense_layers:
            return Lfm2Layer.build_mlp(config, placement, index)
        name, sizes = f"model.layers.{index}.feed_forward", config.experts
        router = Router(
            placement,
            f"{name}.gate",
            rule=RouteRule(sizes.top_k, "sigmoid", renormalise=config.renormalise, scaling=config.scaling),
            hidden=sizes.hidden,
            experts=sizes.experts,
            selection_bias=f"{name}.expert_bias" if config.has_selection_bias else None,
        )
        return listed_experts(placement, f"{name}.experts", sizes, ("w1", "w3", "w2"), router)


class Lfm2Moe(Lfm2):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Lfm2MoeConfig
    Layer: ClassVar[type[Any]] = Lfm2MoeLayer
