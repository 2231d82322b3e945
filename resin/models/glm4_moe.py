"""GLM-4.5 and 4.6: half of each head turns; after a few dense layers, routed experts and one that every token takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from flax import nnx

from resin.models.config import MOST_LAYERS
from resin.models.config_reader import ConfigReader
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, listed_experts
from resin.models.llama import Llama, LlamaConfig, LlamaLayer
from resin.models.mlp import GatedMLP
from resin.models.routers import Router
from resin.models.shared_expert import SharedExpert
from resin.pallas_kernels.route import RouteRule

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5}
SUM_EPS = 1e-20  # added to the sum that weights are divided by


@dataclass(frozen=True, slots=True)
class Glm4MoeConfig(LlamaConfig):
    """As LlamaConfig, with the experts; `ffn` is the width of the first `dense_layers`, which have none."""

    experts: ExpertSizes
    dense_layers: int
    shared_width: int
    renormalise: bool
    scaling: float
    qk_norm: bool
    draft_layers: int  # beyond the last: they guess further tokens, and are left alone

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config; raises InvalidRequest as `LlamaConfig.from_hf` does."""
        given = ConfigReader.of(config)
        given.only("n_group", 1)
        given.only("topk_group", 1)
        experts = ExpertSizes.read(
            given, experts=("n_routed_experts", "num_local_experts"), width="moe_intermediate_size"
        )
        return cls.read_llama(
            given,
            DEFAULTS,
            qkv_bias=given.flag("attention_bias", default=False),
            output_bias=False,
            experts=experts,
            dense_layers=given.integer("first_k_dense_replace", default=1, low=0, high=MOST_LAYERS),
            shared_width=experts.width * given.integer("n_shared_experts", default=1),
            renormalise=given.flag("norm_topk_prob", default=True),
            scaling=given.number("routed_scaling_factor", default=1.0, above=0, high=1e6),
            qk_norm=given.flag("use_qk_norm", default=False),
            draft_layers=given.integer(
                "num_nextn_predict_layers", "num_mtp_layers", default=1, low=0, high=MOST_LAYERS
            ),
        )


class Glm4MoeLayer(LlamaLayer):
    """A Llama layer whose feed-forward part may be a mixture of experts with a shared one."""

    def __init__(self, config: Any, placement: Placement, index: int) -> None:
        self.qk_norm = config.qk_norm
        super().__init__(config, placement, index)

    @staticmethod
    def build_mlp(config: Any, placement: Placement, index: int) -> nnx.Module:
        """The feed-forward layer."""
        if index < config.dense_layers:
            return LlamaLayer.build_mlp(config, placement, index)
        name, sizes = f"model.layers.{index}.mlp", config.experts
        router = Router(
            placement,
            f"{name}.gate",
            rule=RouteRule(
                sizes.top_k, "sigmoid", renormalise=config.renormalise, scaling=config.scaling, sum_eps=SUM_EPS
            ),
            hidden=sizes.hidden,
            experts=sizes.experts,
            selection_bias=f"{name}.gate.e_score_correction_bias",
        )
        experts = listed_experts(placement, f"{name}.experts", sizes, ("gate_proj", "up_proj", "down_proj"), router)
        shared = GatedMLP(placement, f"{name}.shared_experts", hidden=config.hidden, width=config.shared_width)
        return SharedExpert(placement, experts, shared, hidden=config.hidden)


class Glm4Moe(Llama):
    """Tokens to final hidden states, and hidden states to logits."""

    Config: ClassVar[type[Any]] = Glm4MoeConfig
    Layer: ClassVar[type[Any]] = Glm4MoeLayer

    def __init__(self, config: Any, placement: Placement) -> None:
        super().__init__(config, placement)
        drafts = range(config.layers, config.layers + config.draft_layers)
        self.ignored_tensors = (*self.ignored_tensors, *(f"model.layers.{index}." for index in drafts))
