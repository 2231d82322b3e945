"""LFM2 mixture of experts: LFM2 with routed experts after the first few layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from resin.models.config import MOST_LAYERS
from resin.models.config_reader import ConfigReader
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
        given = ConfigReader.of(config)
        # Of the dense relative: the widths of this one are what they say.
        given.ignore("block_auto_adjust_ff_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
        return cls.read_lfm2(
            given,
            ffn=given.integer("intermediate_size"),
            experts=ExpertSizes.read(
                given, experts=("num_experts", "num_local_experts"), width="moe_intermediate_size"
            ),
            dense_layers=given.integer("num_dense_layers", default=2, low=0, high=MOST_LAYERS),
            has_selection_bias=given.flag("use_expert_bias", default=True),
            renormalise=given.flag("norm_topk_prob", default=True),
            scaling=given.number("routed_scaling_factor", default=1.0, above=0, high=1e6),
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
