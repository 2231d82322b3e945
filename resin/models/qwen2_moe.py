"""Qwen2 and Qwen1.5 mixtures of experts: Qwen2 with routed experts, and one that every token takes by a share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config import MOST_LAYERS
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, MixtureOfExperts, listed_experts
from resin.models.llama import LlamaLayer
from resin.models.mlp import GatedMLP
from resin.models.qwen2 import Qwen2, Qwen2Config
from resin.models.routers import Router
from resin.models.shared_expert import SharedExpert
from resin.pallas_kernels.route import RouteRule


@dataclass(frozen=True, slots=True)
class Qwen2MoeConfig(Qwen2Config):
    """As LlamaConfig, with the experts; `ffn` is the width of layers without them."""

    experts: ExpertSizes
    expert_layers: tuple[bool, ...]
    renormalise: bool
    shared_width: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        given.only("attention_bias", False)
        return cls.read_qwen2(
            given,
            has_window=lambda index, bound: index % 2 == 0 and index < bound,
            qkv_bias=given.flag("qkv_bias", default=True),
            output_bias=False,
            shared_width=given.integer("shared_expert_intermediate_size", default=5632),
            **read_experts(given),
        )


def read_experts(given: ConfigReader) -> dict[str, Any]:
    """What the mixtures of Qwen share: the experts, the layers that have them, and whether weights sum to 1."""
    step, plain = given.integer("decoder_sparse_step", default=1), given.integers("mlp_only_layers") or ()
    layers = given.integer("num_hidden_layers", high=MOST_LAYERS)
    names = ("num_experts", "num_local_experts")
    return {
        "experts": ExpertSizes.read(given, experts=names, width="moe_intermediate_size"),
        "expert_layers": tuple(index not in plain and (index + 1) % step == 0 for index in range(layers)),
        "renormalise": given.flag("norm_topk_prob", default=False),
    }


def build_experts(config: Any, placement: Placement, name: str) -> MixtureOfExperts:
    """The routed experts of a layer of such a config."""
    sizes = config.experts
    rule = RouteRule(sizes.top_k, renormalise=config.renormalise)
    router = Router(placement, f"{name}.gate", rule=rule, hidden=sizes.hidden, experts=sizes.experts)
    return listed_experts(placement, f"{name}.experts", sizes, ("gate_proj", "up_proj", "down_proj"), router)


class Qwen2MoeLayer(LlamaLayer):
    """A Llama layer whose feed-forward part may be a mixture of experts with a shared one."""

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        if not config.expert_layers[index]:
            return LlamaLayer.build_mlp(config, placement, index)
        name = f"model.layers.{index}.mlp"
        shared = GatedMLP(placement, f"{name}.shared_expert", hidden=config.hidden, width=config.shared_width)
        experts = build_experts(config, placement, name)
        return SharedExpert(placement, experts, shared, hidden=config.hidden, share=f"{name}.shared_expert_gate")


class Qwen2Moe(Qwen2):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Qwen2MoeConfig
    Layer: ClassVar[type[Any]] = Qwen2MoeLayer
