"""Qwen3 mixture of experts: Qwen3 with routed experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from resin.models.config import fields_of, require
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, listed_experts
from resin.models.qwen3 import Qwen3, Qwen3Config, Qwen3Layer
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(Qwen3Config):
    """As LlamaConfig, with the experts; `ffn` is the width of layers without them."""

    experts: ExpertSizes
    expert_layers: tuple[bool, ...]
    renormalise: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        dense = Qwen3Config.from_hf(config)
        step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        return cls(
            **fields_of(dense),
            experts=ExpertSizes(
                experts=require(config, "num_experts", "num_local_experts"),
                top_k=require(config, "num_experts_per_tok"),
                hidden=dense.hidden,
                width=require(config, "moe_intermediate_size"),
            ),
            expert_layers=tuple(index not in plain and (index + 1) % step == 0 for index in range(dense.layers)),
            renormalise=bool(config.get("norm_topk_prob", False)),
        )


class Qwen3MoeLayer(Qwen3Layer):
    """A Qwen3 layer whose feed-forward part may be a mixture of experts."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        if not config.expert_layers[index]:
            return Qwen3Layer.build_mlp(config, placement, index)
        name, sizes = f"model.layers.{index}.mlp", config.experts
        router = Router(
            placement,
            f"{name}.gate",
            rule=RouteRule(sizes.top_k, renormalise=config.renormalise),
            hidden=sizes.hidden,
            experts=sizes.experts,
        )
        return listed_experts(placement, f"{name}.experts", sizes, ("gate_proj", "up_proj", "down_proj"), router)


class Qwen3Moe(Qwen3):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Qwen3MoeConfig
    Layer: ClassVar[type[Any]] = Qwen3MoeLayer
