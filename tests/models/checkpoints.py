"""Popular checkpoints, what the loader reads of each config (restated, not copied), and what becomes of it.

python -m tests.models.checkpoints    # prints the table of docs/checkpoints.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.models.test_published import CONFIGS

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint.

    Attributes:
        name: as people call it; a hub id where it has one.
        config: what its config.json says, or the keys of a GGUF file without the architecture's name in front.
        billions: parameters where it loads.
        refused: what refuses it, as the error begins; None if it loads.
        architecture: of a GGUF file.
    """

    name: str
    config: Config = field(repr=False)
    billions: float | None = None
    refused: str | None = None
    architecture: str | None = None

    @property
    def kind(self) -> str:
        """What says which model it is."""
        return f"GGUF {self.architecture}" if self.architecture else str(self.config["model_type"])

    @property
    def result(self) -> str:
        """The last column."""
        return f"refused: `{self.refused}`" if self.refused else f"loads, {self.billions:.4g} B"


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": longest,
    }


_WRITTEN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_LLAMA = {
    **_WRITTEN,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_008, 128_009],
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_LLAMA2 = {**_LLAMA, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10_000.0}


def _llama3(factor: float) -> dict[str, Any]:
    rope = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return {"rope_scaling": {**rope, "original_max_position_embeddings": 8192}}


_LLAMA_8B = {**_LLAMA, **_llama3(8.0), **_shape(4096, 14_336, 32, 32, 8, 128_256, 131_072)}
_LLAMA_70B = {**_LLAMA, **_llama3(8.0), **_shape(8192, 28_672, 80, 64, 8, 128_256, 131_072)}
_MISTRAL = {
    **_WRITTEN,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
}
_MISTRAL_7B = _shape(4096, 14_336, 32, 32, 8, 32_000, 32_768)
_MIXTRAL = {
    **_MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.0,
}
_OLMO2 = {
    **_WRITTEN,
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100_257,
    "model_type": "olmo2",
    "pad_token_id": 100_277,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000,
}
_OLMO3 = {
    **_OLMO2,
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "sliding_window": 4096,
}


def _sliding_then_full(layers: int, period: int = 4) -> list[str]:
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


_SMOLLM3 = {
    **_WRITTEN,
    **_shape(2048, 11_008, 36, 16, 4, 128_256, 65_536),
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128_000,
    "eos_token_id": 128_012,
    "layer_types": ["full_attention"] * 36,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "pad_token_id": 128_004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
_GRANITE = {
    **_WRITTEN,
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "logits_scaling": 16.0,
    "mlp_bias": False,
    "model_type": "granite",
    "pad_token_id": 0,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "tie_word_embeddings": True,
}
_GRANITE_MOE = {
    **{name: value for name, value in _GRANITE.items() if name != "mlp_bias"},
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_multiplier": 0.015625,
    "logits_scaling": 6.0,
    "model_type": "granitemoe",
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
}
_EXAONE4 = {
    **_WRITTEN,
    "architectures": ["Exaone4ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 361,
    "model_type": "exaone4",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000,
}
_QWEN_MOE = {
    **_WRITTEN,
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
_QWEN15_MOE = {
    **_QWEN_MOE,
    **_shape(2048, 5632, 24, 16, 16, 151_936, 8192),
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32_768,
}
_GLM = {
    **_WRITTEN,
    **_shape(4096, 13_696, 40, 32, 2, 151_552, 131_072),
    "architectures": ["GlmForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "head_dim": 128,
    "model_type": "glm",
    "pad_token_id": 151_329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10_000.0,
}
_GLM4 = {
    **_GLM,
    "architectures": ["Glm4ForCausalLM"],
    "max_position_embeddings": 32_768,
    "model_type": "glm4",
    "rms_norm_eps": 1e-5,
}
_GLM45_AIR = {
    **_WRITTEN,
    **_shape(4096, 10_944, 46, 96, 8, 151_552, 131_072),
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
_GLM45 = {
    **_GLM45_AIR,
    **_shape(5120, 12_288, 92, 96, 8, 151_552, 131_072),
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
_SMOLLM = {
    **_LLAMA,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_llama_config": True,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
_QWEN2 = {
    **_WRITTEN,
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
}
_QWEN2_7B = {**_QWEN2, **_shape(3584, 18_944, 28, 28, 4, 152_064, 32_768)}
_QWEN3 = {
    **_WRITTEN,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "head_dim": 128,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN3_8B = {**_QWEN3, **_shape(4096, 12_288, 36, 32, 8, 151_936, 40_960)}
_QWEN3_MOE = {
    **_QWEN3,
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
_QWEN3_30B = {**_QWEN3_MOE, **_shape(2048, 6144, 48, 32, 4, 151_936, 40_960), "moe_intermediate_size": 768}
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "model_type": "gemma2",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "use_cache": True,
}
_GEMMA3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
}


def _gemma3_vision(**text: Any) -> dict[str, Any]:
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "eos_token_id": [1, 106],
        "image_token_index": 262_144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **rope, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }


_COHERE = {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "model_max_length": 131_072,
    "model_type": "cohere",
    "pad_token_id": 0,
    "rope_theta": 8_000_000.0,
    "torch_dtype": "float16",
    "use_cache": True,
}
_COHERE2 = {
    **_COHERE,
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "layer_switch": 4,
    "model_type": "cohere2",
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50_000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}
_PHI = {
    **_WRITTEN,
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32_000,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
_PHI_LONG = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "sliding_window": 262_144,
}
_LFM2_WRITTEN = {
    "block_auto_adjust_ff_dim": True,
    "block_dim": 1024,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-5,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "conv_use_xavier_init": True,
    "num_heads": 16,
    "use_pos_enc": True,
}
_GPT_OSS_WRITTEN = {
    "attention_bias": True,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "output_router_logits": False,
    "pad_token_id": 199_999,
    "router_aux_loss_coef": 0.9,
    "swiglu_limit": 7.0,
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _packed(config: Config, method: str, **settings: Any) -> dict[str, Any]:
    return {**config, "quantization_config": {"quant_method": method, **settings}}


_AWQ = {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
_GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.1, "sym": True, "true_sequential": True}
_NF4 = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
}
_FBGEMM = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
_LLAMA_405B = {**_LLAMA, **_llama3(8.0), **_shape(16_384, 53_248, 126, 128, 8, 128_256, 131_072)}


def _compressed(kind: str, number: str, bits: int, strategy: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors, as its files have them."""
    own = {"dynamic": False, "num_bits": bits, "observer": "minmax", "strategy": strategy, "symmetric": True}
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**own, "type": number, "block_structure": None, **weights},
    }
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _other(name: str, model_type: str, **settings: Any) -> Case:
    """A checkpoint of a family that is not computed."""
    return Case(name, {**_WRITTEN, "model_type": model_type, **settings}, refused=f"model_type={model_type!r}")


def _gguf(name: str, architecture: str, shape: Config, **keys: Any) -> Case:
    """A GGUF file of a published shape."""
    billions, refused = keys.pop("billions", None), keys.pop("refused", None)
    own = {
        "block_count": shape["num_hidden_layers"],
        "context_length": shape["max_position_embeddings"],
        "embedding_length": shape["hidden_size"],
        "feed_forward_length": shape["intermediate_size"],
        "attention.head_count": shape["num_attention_heads"],
        "attention.head_count_kv": shape["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": shape.get("rope_theta", 10_000.0),
        "vocab_size": shape["vocab_size"],
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    return Case(name, own, billions, refused, architecture)


CASES: tuple[Case, ...] = (
    Case("meta-llama/Llama-2-7b-chat-hf", {**_LLAMA2, **_shape(4096, 11_008, 32, 32, 32, 32_000, 4096)}, 6.738),
    Case("meta-llama/Meta-Llama-3-8B-Instruct", {**_LLAMA, **_shape(4096, 14_336, 32, 32, 8, 128_256, 8192)}, 8.030),
    Case("meta-llama/Llama-3.1-8B-Instruct", _LLAMA_8B, 8.030),
    Case(
        "meta-llama/Llama-3.2-1B-Instruct",
        {
            **_LLAMA,
            **_llama3(32.0),
            **_shape(2048, 8192, 16, 32, 8, 128_256, 131_072),
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1.236,
    ),
    Case("meta-llama/Llama-3.3-70B-Instruct", _LLAMA_70B, 70.55),
    Case("NousResearch/Hermes-3-Llama-3.1-8B", _LLAMA_8B, 8.030),
    Case("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {**_LLAMA_8B, "eos_token_id": 128_001}, 8.030),
    Case("TinyLlama/TinyLlama-1.1B-Chat-v1.0", {**_LLAMA2, **_shape(2048, 5632, 22, 32, 4, 32_000, 2048)}, 1.100),
    Case(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {**_SMOLLM, **_shape(576, 1536, 30, 9, 3, 49_152, 8192), "rope_theta": 100_000},
        0.1345,
    ),
    Case(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        {**_SMOLLM, **_shape(2048, 8192, 24, 32, 32, 49_152, 8192), "rope_theta": 130_000},
        1.711,
    ),
    Case("HuggingFaceTB/SmolLM3-3B", _SMOLLM3, 3.075),
    Case(
        "mistralai/Mistral-7B-Instruct-v0.1",
        {**_MISTRAL, **_MISTRAL_7B, "rope_theta": 10_000.0, "sliding_window": 4096},
        7.242,
    ),
    Case(
        "HuggingFaceH4/zephyr-7b-beta",
        {**_MISTRAL, **_MISTRAL_7B, "rope_theta": 10_000.0, "sliding_window": 4096},
        7.242,
    ),
    Case("mistralai/Mistral-7B-Instruct-v0.3", {**_MISTRAL, **_MISTRAL_7B, "vocab_size": 32_768}, 7.248),
    Case(
        "mistralai/Mistral-Nemo-Instruct-2407",
        {**_MISTRAL, **_shape(5120, 14_336, 40, 32, 8, 131_072, 1_024_000), "head_dim": 128},
        12.25,
    ),
    Case(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        {**_MISTRAL, **_shape(5120, 32_768, 40, 32, 8, 131_072, 32_768), "head_dim": 128, "rope_theta": 100_000_000.0},
        23.57,
    ),
    Case(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                **_shape(5120, 32_768, 40, 32, 8, 131_072, 131_072),
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_act": "silu",
                "model_type": "mistral",
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000_000.0,
                "sliding_window": None,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
        23.57,
    ),
    Case("mistralai/Mixtral-8x7B-Instruct-v0.1", {**_MIXTRAL, **_MISTRAL_7B}, 46.70),
    Case(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        {**_MIXTRAL, **_shape(6144, 16_384, 56, 48, 8, 32_768, 65_536)},
        140.6,
    ),
    Case("Qwen/Qwen2-7B-Instruct", {**_QWEN2_7B, "sliding_window": 131_072}, 7.616),
    Case("Qwen/Qwen2.5-7B-Instruct", {**_QWEN2_7B, "sliding_window": 131_072}, 7.616),
    Case(
        "Qwen/Qwen2.5-0.5B-Instruct",
        {
            **_QWEN2,
            **_shape(896, 4864, 24, 14, 2, 151_936, 32_768),
            "max_window_layers": 21,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
        },
        0.494,
    ),
    Case(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        {**_QWEN2_7B, "max_position_embeddings": 131_072, "rope_theta": 10_000, "sliding_window": 4096},
        7.616,
    ),
    Case("Qwen/Qwen1.5-MoE-A2.7B-Chat", _QWEN15_MOE, 14.32),
    Case(
        "Qwen/Qwen2-57B-A14B-Instruct",
        {
            **_QWEN_MOE,
            **_shape(3584, 18_944, 28, 28, 4, 151_936, 32_768),
            "max_window_layers": 28,
            "moe_intermediate_size": 2560,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "shared_expert_intermediate_size": 20_480,
            "sliding_window": 65_536,
        },
        57.41,
    ),
    Case(
        "Qwen/Qwen3-0.6B",
        {**_QWEN3, **_shape(1024, 3072, 28, 16, 8, 151_936, 40_960), "tie_word_embeddings": True},
        0.596,
    ),
    Case("Qwen/Qwen3-8B", _QWEN3_8B, 8.191),
    Case("Qwen/Qwen3-32B", {**_QWEN3, **_shape(5120, 25_600, 64, 64, 8, 151_936, 40_960)}, 32.76),
    Case("Qwen/Qwen3-30B-A3B", _QWEN3_30B, 30.53),
    Case(
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        {
            **_QWEN3_30B,
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
        {**_QWEN3_MOE, **_shape(4096, 12_288, 94, 64, 4, 151_936, 40_960), "moe_intermediate_size": 1536},
        235.1,
    ),
    _other("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
    Case("Qwen/Qwen3-8B-FP8", {**_QWEN3_8B, "quantization_config": _FP8}, 8.191),
    Case("Qwen/Qwen3-8B-AWQ", _packed(_QWEN3_8B, "awq", **_AWQ), 8.191),
    Case("Qwen/Qwen3-30B-A3B-GPTQ-Int4", _packed(_QWEN3_30B, "gptq", **_GPTQ, desc_act=False, meta={}), 30.53),
    Case("google/gemma-2-2b-it", {**_GEMMA2, **_shape(2304, 9216, 26, 8, 4, 256_000, 8192)}, 2.614),
    Case("google/gemma-2-9b-it", {**_GEMMA2, **_shape(3584, 14_336, 42, 16, 8, 256_000, 8192)}, 9.242),
    Case(
        "google/gemma-2-27b-it",
        {
            **_GEMMA2,
            **_shape(4608, 36_864, 46, 32, 16, 256_000, 8192),
            "head_dim": 128,
            "query_pre_attn_scalar": 144,
        },
        27.23,
    ),
    Case(
        "google/gemma-3-270m-it",
        {**_GEMMA3, **CONFIGS["Gemma-3-270m"], "use_bidirectional_attention": False},
        0.268,
    ),
    Case(
        "google/gemma-3-1b-it",
        {
            **_GEMMA3,
            **_shape(1152, 6912, 26, 4, 1, 262_144, 32_768),
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        1.000,
    ),
    Case(
        "google/gemma-3-4b-it",
        _gemma3_vision(hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34, sliding_window=1024),
        3.880,
    ),
    Case(
        "google/gemma-3-12b-it",
        _gemma3_vision(**_shape(3840, 15_360, 48, 16, 8, 262_208, 131_072), sliding_window=1024),
        11.77,
    ),
    Case(
        "google/gemma-3-27b-it",
        _gemma3_vision(
            **_shape(5376, 21_504, 62, 32, 16, 262_208, 131_072),
            head_dim=128,
            query_pre_attn_scalar=168,
            sliding_window=1024,
        ),
        27.01,
    ),
    Case("allenai/OLMo-2-0425-1B-Instruct", {**_OLMO2, **_shape(2048, 8192, 16, 16, 16, 100_352, 4096)}, 1.485),
    Case("allenai/OLMo-2-1124-7B-Instruct", {**_OLMO2, **_shape(4096, 11_008, 32, 32, 32, 100_352, 4096)}, 7.299),
    Case("allenai/OLMo-2-0325-32B-Instruct", {**_OLMO2, **_shape(5120, 27_648, 64, 40, 8, 100_352, 4096)}, 32.23),
    Case(
        "microsoft/Phi-3-mini-4k-instruct",
        {**_PHI, **_shape(3072, 8192, 32, 32, 32, 32_064, 4096), "sliding_window": 2047},
        3.821,
    ),
    Case(
        "microsoft/Phi-3.5-mini-instruct",
        {**_PHI, **_PHI_LONG, **_shape(3072, 8192, 32, 32, 32, 32_064, 131_072)},
        3.821,
    ),
    Case(
        "microsoft/phi-4",
        {
            **_PHI,
            **_shape(5120, 17_920, 40, 40, 10, 100_352, 16_384),
            "original_max_position_embeddings": 16_384,
            "rope_theta": 250_000,
            "sliding_window": None,
        },
        14.66,
    ),
    Case(
        "microsoft/Phi-4-mini-instruct",
        {
            **_PHI,
            **_PHI_LONG,
            **_shape(3072, 8192, 32, 24, 8, 200_064, 131_072),
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
        3.836,
    ),
    Case(
        "allenai/Olmo-3-7B-Instruct",
        {**_OLMO3, **_shape(4096, 11_008, 32, 32, 32, 100_278, 65_536), "layer_types": _sliding_then_full(32)},
        7.298,
    ),
    Case(
        "allenai/Olmo-3.1-32B-Instruct",
        {**_OLMO3, **_shape(5120, 27_648, 64, 40, 8, 100_278, 65_536), "layer_types": _sliding_then_full(64)},
        32.23,
    ),
    Case(
        "ibm-granite/granite-3.3-2b-instruct",
        {
            **_GRANITE,
            **_shape(2048, 8192, 40, 32, 8, 49_159, 131_072),
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
        },
        2.534,
    ),
    Case(
        "ibm-granite/granite-3.3-8b-instruct",
        {**_GRANITE, **_shape(4096, 12_800, 40, 32, 8, 49_159, 131_072)},
        8.171,
    ),
    Case(
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        {**_GRANITE_MOE, **_shape(1024, 512, 24, 16, 8, 49_155, 131_072), "num_local_experts": 32},
        1.335,
    ),
    Case(
        "ibm-granite/granite-3.1-3b-a800m-instruct",
        {**_GRANITE_MOE, **_shape(1536, 512, 32, 24, 8, 49_155, 131_072), "num_local_experts": 40},
        3.299,
    ),
    Case(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        {
            **_EXAONE4,
            **_shape(2048, 4096, 30, 32, 8, 102_400, 65_536),
            "head_dim": 64,
            "layer_types": ["full_attention"] * 30,
            "rope_scaling": {**_llama3(16.0)["rope_scaling"]},
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
        1.279,
    ),
    Case(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        {
            **_EXAONE4,
            **_shape(5120, 27_392, 64, 40, 8, 102_400, 131_072),
            "head_dim": 128,
            "layer_types": _sliding_then_full(64),
            "rope_scaling": {**_llama3(16.0)["rope_scaling"]},
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        32.00,
    ),
    Case("zai-org/glm-4-9b-chat-hf", _GLM, 9.400),
    Case("zai-org/GLM-4-9B-0414", _GLM4, 9.400),
    Case(
        "zai-org/GLM-4-32B-0414",
        {**_GLM4, **_shape(6144, 23_040, 61, 48, 2, 151_552, 32_768), "attention_bias": False},
        32.57,
    ),
    Case("zai-org/GLM-4.5-Air", _GLM45_AIR, 106.9),
    Case("zai-org/GLM-4.5", _GLM45, 352.8),
    Case("zai-org/GLM-4.6", {**_GLM45, "max_position_embeddings": 202_752}, 352.8),
    Case("CohereLabs/c4ai-command-r-v01", {**_COHERE, **_shape(8192, 22_528, 40, 64, 64, 256_000, 8192)}, 34.98),
    Case(
        "CohereLabs/c4ai-command-r-plus",
        {**_COHERE, **_shape(12_288, 33_792, 64, 96, 8, 256_000, 8192), "use_qk_norm": True},
        103.8,
    ),
    Case(
        "CohereLabs/aya-expanse-8b",
        {**_COHERE, **_shape(4096, 14_336, 32, 32, 8, 256_000, 8192), "logit_scale": 0.125, "rope_theta": 10_000},
        8.028,
    ),
    Case(
        "CohereLabs/c4ai-command-r7b-12-2024",
        {**_COHERE2, **_shape(4096, 14_336, 32, 32, 8, 256_000, 132_096), "logit_scale": 0.25},
        8.028,
    ),
    Case(
        "CohereLabs/c4ai-command-a-03-2025",
        {**_COHERE2, **_shape(12_288, 36_864, 64, 96, 8, 256_000, 131_072), "logit_scale": 0.25},
        111.06,
    ),
    _other("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3", quantization_config=_FP8),
    _other("deepseek-ai/DeepSeek-R1", "deepseek_v3", quantization_config=_FP8),
    _other("moonshotai/Kimi-K2-Instruct", "kimi_k2", quantization_config=_FP8),
    Case("openai/gpt-oss-20b", {**_WRITTEN, **CONFIGS["gpt-oss-20b"], **_GPT_OSS_WRITTEN}, 20.91),
    Case("openai/gpt-oss-120b", {**_WRITTEN, **CONFIGS["gpt-oss-120b"], **_GPT_OSS_WRITTEN}, 116.8),
    Case("LiquidAI/LFM2-350M", {**_LFM2_WRITTEN, **CONFIGS["LFM2-350M"]}, 0.354),
    Case("LiquidAI/LFM2-1.2B", {**_LFM2_WRITTEN, **CONFIGS["LFM2-1.2B"]}, 1.170),
    Case("LiquidAI/LFM2-2.6B", {**_LFM2_WRITTEN, **CONFIGS["LFM2-2.6B"]}, 2.569),
    Case("LiquidAI/LFM2-8B-A1B", CONFIGS["LFM2-8B-A1B"], 8.339),
    Case(
        "LiquidAI/LFM2.5-1.2B-Instruct",
        {
            **_LFM2_WRITTEN,
            **CONFIGS["LFM2-1.2B"],
            "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
            "tie_embedding": True,
        },
        1.170,
    ),
    Case(
        "LiquidAI/LFM2-VL-1.6B",
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "downsample_factor": 2,
            "image_token_index": 396,
            "max_tiles": 10,
            "model_type": "lfm2_vl",
            "text_config": {**_LFM2_WRITTEN, **CONFIGS["LFM2-1.2B"]},
            "torch_dtype": "bfloat16",
            "vision_config": {"model_type": "siglip2_vision_model"},
            "vision_feature_layer": -1,
        },
        1.170,
    ),
    Case(
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        _packed(_LLAMA_8B, "awq", **_AWQ, do_fuse=False),
        8.030,
    ),
    Case(
        "TheBloke/Llama-2-7B-Chat-GPTQ",
        _packed({**_LLAMA2, **_shape(4096, 11_008, 32, 32, 32, 32_000, 4096)}, "gptq", **_GPTQ, desc_act=True),
        6.738,
    ),
    Case(
        "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        _packed({**_LLAMA_8B, "unsloth_version": "2025.1"}, "bitsandbytes", **_NF4),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
        _packed(_LLAMA_8B, "compressed-tensors", **_compressed("float-quantized", "float", 8, "tensor")),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
        _packed(_LLAMA_8B, "compressed-tensors", **_compressed("pack-quantized", "int", 4, "group", group_size=128)),
        8.030,
    ),
    Case(
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        _packed(_LLAMA_8B, "compressed-tensors", **_compressed("int-quantized", "int", 8, "channel")),
        8.030,
    ),
    Case("meta-llama/Llama-3.1-405B-Instruct-FP8", _packed(_LLAMA_405B, "fbgemm_fp8", **_FBGEMM), 405.9),
    Case(
        "nvidia/Llama-3.3-70B-Instruct-FP4",
        _packed(_LLAMA_70B, "modelopt", quant_algo="NVFP4"),
        refused="quantization_config.quant_method='modelopt'",
    ),
    Case(
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        {**_LLAMA_8B, "quantization": {"group_size": 64, "bits": 4}},
        refused="quantization={'group_size': 64, 'bits': 4}",
    ),
    _gguf(
        "TheBloke/Llama-2-7B-Chat-GGUF",
        "llama",
        _shape(4096, 11_008, 32, 32, 32, 32_000, 4096),
        rope__dimension_count=128,
        billions=6.738,
    ),
    _gguf("TheBloke/Mistral-7B-Instruct-v0.2-GGUF", "llama", _MISTRAL_7B, rope__dimension_count=128, billions=7.242),
    _gguf(
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        "llama",
        _LLAMA_8B,
        attention__key_length=128,
        attention__value_length=128,
        billions=8.030,
    ),
    _gguf(
        "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF",
        "llama",
        _MISTRAL_7B,
        rope__dimension_count=128,
        expert_count=8,
        expert_used_count=2,
        billions=46.70,
    ),
    _gguf(
        "allenai/OLMo-2-1124-7B-Instruct-GGUF",
        "olmo2",
        {**_shape(4096, 11_008, 32, 32, 32, 100_352, 4096), "rope_theta": 500_000.0},
        billions=7.299,
    ),
    _gguf(
        "unsloth/Olmo-3-7B-Instruct-GGUF",
        "olmo2",
        {**_shape(4096, 11_008, 32, 32, 32, 100_278, 65_536), "rope_theta": 500_000.0},
        attention__sliding_window=4096,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in _sliding_then_full(32)],
        rope__scaling__type="yarn",
        rope__scaling__factor=8.0,
        rope__scaling__original_context_length=8192,
        billions=7.298,
    ),
    _gguf("ggml-org/SmolLM3-3B-GGUF", "smollm3", _SMOLLM3, rope__dimension_count=128, billions=3.075),
    _gguf(
        "LGAI-EXAONE/EXAONE-4.0-32B-GGUF",
        "exaone4",
        {**_shape(5120, 27_392, 64, 40, 8, 102_400, 131_072), "rope_theta": 1_000_000.0},
        attention__key_length=128,
        attention__value_length=128,
        attention__sliding_window=4096,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in _sliding_then_full(64)],
        billions=32.00,
    ),
    _gguf(
        "ibm-granite/granite-3.3-8b-instruct-GGUF",
        "granite",
        {**_shape(4096, 12_800, 40, 32, 8, 49_159, 131_072), "rope_theta": 10_000_000.0},
        attention__scale=0.0078125,
        embedding_scale=12.0,
        logit_scale=16.0,
        residual_scale=0.22,
        rope__dimension_count=128,
        billions=8.171,
    ),
    _gguf(
        "bartowski/granite-3.1-3b-a800m-instruct-GGUF",
        "granitemoe",
        {**_shape(1536, 512, 32, 24, 8, 49_155, 131_072), "rope_theta": 10_000_000.0},
        attention__scale=0.015625,
        embedding_scale=12.0,
        expert_count=40,
        expert_used_count=8,
        logit_scale=6.0,
        residual_scale=0.22,
        rope__dimension_count=64,
        billions=3.299,
    ),
    _gguf(
        "mradermacher/Qwen1.5-MoE-A2.7B-Chat-GGUF",
        "qwen2moe",
        _QWEN15_MOE,
        expert_count=60,
        expert_used_count=4,
        expert_feed_forward_length=1408,
        expert_shared_feed_forward_length=5632,
        billions=14.32,
    ),
    _gguf("bartowski/glm-4-9b-chat-GGUF", "chatglm", _GLM, rope__dimension_count=64, billions=9.400),
    _gguf("bartowski/THUDM_GLM-4-9B-0414-GGUF", "glm4", _GLM4, rope__dimension_count=64, billions=9.400),
    _gguf(
        "unsloth/GLM-4.5-Air-GGUF",
        "glm4moe",
        {**_GLM45_AIR, "num_hidden_layers": 47},
        attention__key_length=128,
        attention__value_length=128,
        rope__dimension_count=64,
        expert_count=128,
        expert_used_count=8,
        expert_feed_forward_length=1408,
        expert_shared_count=1,
        expert_gating_func=2,
        expert_weights_scale=1.0,
        expert_weights_norm=True,
        leading_dense_block_count=1,
        nextn_predict_layers=1,
        billions=106.9,
    ),
    _gguf("Qwen/Qwen2.5-7B-Instruct-GGUF", "qwen2", _QWEN2_7B, billions=7.616),
    _gguf(
        "Qwen/Qwen3-8B-GGUF",
        "qwen3",
        _QWEN3_8B,
        attention__key_length=128,
        attention__value_length=128,
        billions=8.191,
    ),
    _gguf(
        "unsloth/Qwen3-30B-A3B-GGUF",
        "qwen3moe",
        _QWEN3_30B,
        attention__key_length=128,
        attention__value_length=128,
        expert_count=128,
        expert_used_count=8,
        expert_feed_forward_length=768,
        billions=30.53,
    ),
    _gguf(
        "bartowski/c4ai-command-r7b-12-2024-GGUF",
        "cohere2",
        {**_shape(4096, 14_336, 32, 32, 8, 256_000, 132_096), "rope_theta": 50_000.0},
        attention__layer_norm_epsilon=1e-5,
        attention__sliding_window=4096,
        logit_scale=0.25,
        rope__dimension_count=128,
        rope__scaling__type="none",
        billions=8.028,
    ),
    _gguf(
        "bartowski/phi-4-GGUF",
        "phi3",
        {**_shape(5120, 17_920, 40, 40, 10, 100_352, 16_384), "rope_theta": 250_000.0},
        attention__sliding_window=0,
        rope__dimension_count=128,
        rope__scaling__original_context_length=16_384,
        billions=14.66,
    ),
    _gguf(
        "bartowski/gemma-2-2b-it-GGUF",
        "gemma2",
        {**_shape(2304, 9216, 26, 8, 4, 256_000, 8192), "tie_word_embeddings": True},
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        billions=2.614,
    ),
    _gguf(
        "ggml-org/gemma-3-1b-it-GGUF",
        "gemma3",
        {**_shape(1152, 6912, 26, 4, 1, 262_144, 32_768), "tie_word_embeddings": True},
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window=512,
        billions=1.000,
    ),
    _gguf(
        "LiquidAI/LFM2-1.2B-GGUF",
        "lfm2",
        {**_shape(2048, 8192, 16, 32, 8, 65_536, 128_000), "tie_word_embeddings": True},
        attention__head_count_kv=[8 if layer in (2, 5, 8, 10, 12, 14) else 0 for layer in range(16)],
        shortconv__l_cache=3,
        billions=1.170,
    ),
    _gguf(
        "ggml-org/gpt-oss-20b-GGUF",
        "gpt-oss",
        {**_shape(2880, 2880, 24, 64, 8, 201_088, 131_072), "rope_theta": 150_000.0},
        attention__key_length=64,
        attention__value_length=64,
        attention__sliding_window=128,
        expert_count=32,
        expert_used_count=4,
        expert_feed_forward_length=2880,
        rope__scaling__type="yarn",
        rope__scaling__factor=32.0,
        rope__scaling__original_context_length=4096,
        billions=20.91,
    ),
    _gguf("unsloth/DeepSeek-V3-0324-GGUF", "deepseek2", _LLAMA_8B, refused="architecture 'deepseek2'"),
)


def table() -> str:
    """The table of docs/checkpoints.md."""
    rows = [f"| {case.name} | `{case.kind}` | {case.result} |" for case in CASES]
    return "\n".join(["| checkpoint | `model_type` | |", "| --- | --- | --- |", *rows])


if __name__ == "__main__":
    print(table())
