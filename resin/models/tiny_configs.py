"""One tiny config a family, with numbers that are awkward: a window shorter than a page, caps so low that they bite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_LFM2 = {
    **_COMMON,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3 = {**_COMMON, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6}

TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "mistral": {
        **_COMMON,
        "model_type": "mistral",
        "num_attention_heads": 8,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": 11,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "qwen3": {**_QWEN3, "model_type": "qwen3"},
    "qwen3_moe": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "lfm2": {
        **_LFM2,
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
    },
    "lfm2_moe": {
        **_LFM2,
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 32,
        "num_dense_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    "gemma2": {
        **_COMMON,
        "model_type": "gemma2",
        "hidden_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "attn_logit_softcapping": 5.0,  # so low that they bite
        "final_logit_softcapping": 3.0,
        "rms_norm_eps": 1e-6,
    },
    "gemma3_text": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gpt_oss": {
        **_COMMON,
        "model_type": "gpt_oss",
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": _YARN_ROPE,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
