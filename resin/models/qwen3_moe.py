"""Qwen3 mixture of experts: Qwen3 with routed experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config import MOST_LAYERS
from resin.models.config_reader import ConfigReader
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
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        step, plain = given.integer("decoder_sparse_step", default=1), given.integers("mlp_only_layers") or ()
        layers = given.integer("num_hidden_layers", high=MOST_LAYERS)
        return cls.read_qwen3(
            given,
            experts=ExpertSizes.read(
                given, experts=("num_experts", "num_local_experts"), width="moe_intermediate_size"
            ),
            expert_layers=tuple(index not in plain and (index + 1) % step == 0 for index in range(layers)),
            renormalise=given.flag("norm_topk_prob", default=False),
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
