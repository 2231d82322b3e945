"""Llama and its nearest relatives, as they are published."""

from __future__ import annotations

from tests.models.checkpoint_case import WRITTEN, Case, llama3, other, shape

LLAMA = {
    **WRITTEN,
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
LLAMA2 = {**LLAMA, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10_000.0}
LLAMA_8B = {**LLAMA, **llama3(8.0), **shape(4096, 14_336, 32, 32, 8, 128_256, 131_072)}
LLAMA_70B = {**LLAMA, **llama3(8.0), **shape(8192, 28_672, 80, 64, 8, 128_256, 131_072)}
MISTRAL = {
    **WRITTEN,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
}
MISTRAL_7B = shape(4096, 14_336, 32, 32, 8, 32_000, 32_768)
SMOLLM3 = {
    **WRITTEN,
    **shape(2048, 11_008, 36, 16, 4, 128_256, 65_536),
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
SMOLLM = {
    **LLAMA,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_llama_config": True,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
QWEN2 = {
    **WRITTEN,
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
}
QWEN2_7B = {**QWEN2, **shape(3584, 18_944, 28, 28, 4, 152_064, 32_768)}
QWEN3 = {
    **WRITTEN,
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
QWEN3_8B = {**QWEN3, **shape(4096, 12_288, 36, 32, 8, 151_936, 40_960)}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}

CASES: tuple[Case, ...] = (
    Case("meta-llama/Llama-2-7b-chat-hf", {**LLAMA2, **shape(4096, 11_008, 32, 32, 32, 32_000, 4096)}, 6.738),
    Case("meta-llama/Meta-Llama-3-8B-Instruct", {**LLAMA, **shape(4096, 14_336, 32, 32, 8, 128_256, 8192)}, 8.030),
    Case("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B, 8.030),
    Case(
        "meta-llama/Llama-3.2-1B-Instruct",
        {
            **LLAMA,
            **llama3(32.0),
            **shape(2048, 8192, 16, 32, 8, 128_256, 131_072),
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        1.236,
    ),
    Case("meta-llama/Llama-3.3-70B-Instruct", LLAMA_70B, 70.55),
    Case("NousResearch/Hermes-3-Llama-3.1-8B", LLAMA_8B, 8.030),
    Case("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {**LLAMA_8B, "eos_token_id": 128_001}, 8.030),
    Case("TinyLlama/TinyLlama-1.1B-Chat-v1.0", {**LLAMA2, **shape(2048, 5632, 22, 32, 4, 32_000, 2048)}, 1.100),
    Case(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {**SMOLLM, **shape(576, 1536, 30, 9, 3, 49_152, 8192), "rope_theta": 100_000},
        0.1345,
    ),
    Case(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        {**SMOLLM, **shape(2048, 8192, 24, 32, 32, 49_152, 8192), "rope_theta": 130_000},
        1.711,
    ),
    Case("HuggingFaceTB/SmolLM3-3B", SMOLLM3, 3.075),
    Case(
        "mistralai/Mistral-7B-Instruct-v0.1",
        {**MISTRAL, **MISTRAL_7B, "rope_theta": 10_000.0, "sliding_window": 4096},
        7.242,
    ),
    Case(
        "HuggingFaceH4/zephyr-7b-beta",
        {**MISTRAL, **MISTRAL_7B, "rope_theta": 10_000.0, "sliding_window": 4096},
        7.242,
    ),
    Case("mistralai/Mistral-7B-Instruct-v0.3", {**MISTRAL, **MISTRAL_7B, "vocab_size": 32_768}, 7.248),
    Case(
        "mistralai/Mistral-Nemo-Instruct-2407",
        {**MISTRAL, **shape(5120, 14_336, 40, 32, 8, 131_072, 1_024_000), "head_dim": 128},
        12.25,
    ),
    Case(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        {**MISTRAL, **shape(5120, 32_768, 40, 32, 8, 131_072, 32_768), "head_dim": 128, "rope_theta": 100_000_000.0},
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
                **shape(5120, 32_768, 40, 32, 8, 131_072, 131_072),
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
    Case("Qwen/Qwen2-7B-Instruct", {**QWEN2_7B, "sliding_window": 131_072}, 7.616),
    Case("Qwen/Qwen2.5-7B-Instruct", {**QWEN2_7B, "sliding_window": 131_072}, 7.616),
    Case(
        "Qwen/Qwen2.5-0.5B-Instruct",
        {
            **QWEN2,
            **shape(896, 4864, 24, 14, 2, 151_936, 32_768),
            "max_window_layers": 21,
            "sliding_window": 32_768,
            "tie_word_embeddings": True,
        },
        0.494,
    ),
    Case(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        {**QWEN2_7B, "max_position_embeddings": 131_072, "rope_theta": 10_000, "sliding_window": 4096},
        7.616,
    ),
    Case(
        "Qwen/Qwen3-0.6B",
        {**QWEN3, **shape(1024, 3072, 28, 16, 8, 151_936, 40_960), "tie_word_embeddings": True},
        0.596,
    ),
    Case("Qwen/Qwen3-8B", QWEN3_8B, 8.191),
    Case("Qwen/Qwen3-32B", {**QWEN3, **shape(5120, 25_600, 64, 64, 8, 151_936, 40_960)}, 32.76),
    other("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
    other("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3", quantization_config=FP8),
    other("deepseek-ai/DeepSeek-R1", "deepseek_v3", quantization_config=FP8),
)
