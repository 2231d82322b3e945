"""Mixtures of experts, as they are published."""

from __future__ import annotations

from tests.models.checkpoint_case import WRITTEN, Case, shape
from tests.models.checkpoints_dense import MISTRAL, MISTRAL_7B, QWEN3
from tests.models.checkpoints_others import GRANITE
from tests.models.test_published import CONFIGS

MIXTRAL = {
    **MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
}
GRANITE_MOE = {
    **{name: value for name, value in GRANITE.items() if name != "mlp_bias"},
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
    "model_type": "granitemoe",
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
}
QWEN_MOE = {
    **WRITTEN,
    "architectures": ["Qwen2MoeForCausalLM"],
    "bos_token_id": 151_643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151_643,
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
}
QWEN15_MOE = {
    **QWEN_MOE,
    **shape(2048, 5632, 24, 16, 16, 151_936, 8192),
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32_768,
}
GLM45_AIR = {
    **WRITTEN,
    **shape(4096, 10_944, 46, 96, 8, 151_552, 131_072),
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151_329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
GLM45 = {
    **GLM45_AIR,
    **shape(5120, 12_288, 92, 96, 8, 151_552, 131_072),
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_30B = {**QWEN3_MOE, **shape(2048, 6144, 48, 32, 4, 151_936, 40_960), "moe_intermediate_size": 768}
GPT_OSS_WRITTEN = {
    "attention_bias": True,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "output_router_logits": False,
    "pad_token_id": 199_999,
    "router_aux_loss_coef": 0.9,
    "swiglu_limit": 7.0,
}

CASES: tuple[Case, ...] = (
    Case("mistralai/Mixtral-8x7B-Instruct-v0.1", {**MIXTRAL, **MISTRAL_7B}, 46.70),
    Case(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        {**MIXTRAL, **shape(6144, 16_384, 56, 48, 8, 32_768, 65_536)},
        140.6,
    ),
    Case("Qwen/Qwen1.5-MoE-A2.7B-Chat", QWEN15_MOE, 14.32),
    Case(
        "Qwen/Qwen2-57B-A14B-Instruct",
        {
            **QWEN_MOE,
            **shape(3584, 18_944, 28, 28, 4, 151_936, 32_768),
            "max_window_layers": 28,
            "moe_intermediate_size": 2560,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 20_480,
            "sliding_window": 65_536,
        },
        57.41,
    ),
    Case("Qwen/Qwen3-30B-A3B", QWEN3_30B, 30.53),
    Case(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        {
            **QWEN3_30B,
            "max_position_embeddings": 262_144,
            "qkv_bias": False,
            "rope_theta": 10_000_000,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
        30.53,
    ),
    Case(
        "Qwen/Qwen3-235B-A22B",
        {**QWEN3_MOE, **shape(4096, 12_288, 94, 64, 4, 151_936, 40_960), "moe_intermediate_size": 1536},
        235.1,
    ),
    Case(
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        {**GRANITE_MOE, **shape(1024, 512, 24, 16, 8, 49_155, 131_072), "num_local_experts": 32},
        1.335,
    ),
    Case(
        "ibm-granite/granite-3.1-3b-a800m-instruct",
        {**GRANITE_MOE, **shape(1536, 512, 32, 24, 8, 49_155, 131_072), "num_local_experts": 40},
        3.299,
    ),
    Case("zai-org/GLM-4.5-Air", GLM45_AIR, 106.9),
    Case("zai-org/GLM-4.5", GLM45, 352.8),
    Case("zai-org/GLM-4.6", {**GLM45, "max_position_embeddings": 202_752}, 352.8),
    Case("openai/gpt-oss-20b", {**WRITTEN, **CONFIGS["gpt-oss-20b"], **GPT_OSS_WRITTEN}, 20.91),
    Case("openai/gpt-oss-120b", {**WRITTEN, **CONFIGS["gpt-oss-120b"], **GPT_OSS_WRITTEN}, 116.8),
    Case("LiquidAI/LFM2-8B-A1B", CONFIGS["LFM2-8B-A1B"], 8.339),
)
