"""Configs of published models, so that benchmarks with random weights need no files.

Each is what the model's config.json says, as far as speed depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from resin import InvalidRequest
from resin.models.loading.checkpoint import CheckpointError, PackedInfo, TensorInfo, Window

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}
_LFM2 = {
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128000,
    "eos_token_id": 7,
    "tie_word_embeddings": True,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "quantization_config": {"quant_method": "mxfp4"},
}


def _layer_types(layers: int, attention: tuple[int, ...]) -> list[str]:
    return ["full_attention" if index in attention else "conv" for index in range(layers)]


def _llama3(hidden: int, ffn: int, layers: int, head_dim: int, rope_factor: float, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "rope_theta": 5e5,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": rope_factor},
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": tied,
        "eos_token_id": [128001, 128008, 128009],
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def _plain(
    model_type: str,
    sizes: tuple[int, int, int, int, int, int],
    longest: int,
    theta: float,
    eps: float,
    tied: bool,
    eos: int,
    **own: Any,
) -> dict[str, Any]:
    """A config of one norm epsilon and one base; `sizes` are hidden, ffn, layers, heads, KV heads and vocabulary."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "vocab_size"),
    )
    return {
        "model_type": model_type,
        **dict(zip(names, sizes, strict=True)),
        "max_position_embeddings": longest,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "tie_word_embeddings": tied,
        "eos_token_id": eos,
        **own,
    }


def _granite(attention: float, logits: float) -> dict[str, Any]:
    return {
        "attention_multiplier": attention,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": logits,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _GPT_OSS | {
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm2-135m": {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_theta": 1e5,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        "llama-3.2-1b": _llama3(2048, 8192, 16, head_dim=64, rope_factor=32.0, tied=True),
        "llama-3.1-8b": _llama3(4096, 14336, 32, head_dim=128, rope_factor=8.0, tied=False),
        "qwen3-0.6b": _qwen3(1024, 3072, 28, heads=16, tied=True),
        "qwen3-8b": _qwen3(4096, 12288, 36, heads=32, tied=False),
        "qwen3-30b-a3b": _QWEN3
        | {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
        "lfm2-350m": _LFM2
        | {
            "model_type": "lfm2",
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "layer_types": _layer_types(16, (2, 5, 8, 10, 12, 14)),
        },
        "lfm2-1.2b": _LFM2
        | {
            "model_type": "lfm2",
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "layer_types": _layer_types(16, (2, 5, 8, 10, 12, 14)),
        },
        "lfm2-8b-a1b": _LFM2
        | {
            "model_type": "lfm2_moe",
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "layer_types": _layer_types(24, (2, 6, 10, 14, 18, 21)),
        },
        "mixtral-8x7b": _plain(
            "mixtral",
            (4096, 14336, 32, 32, 8, 32000),
            *(32768, 1e6, 1e-5, False, 2),
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "olmo2-7b": _plain("olmo2", (4096, 11008, 32, 32, 32, 100352), 4096, 5e5, 1e-6, tied=False, eos=100257),
        "olmo3-7b": _plain(
            "olmo3",
            (4096, 11008, 32, 32, 32, 100278),
            *(65536, 5e5, 1e-6, False, 100257),
            sliding_window=4096,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "attention_factor": 1.2079441541679836,
                "original_max_position_embeddings": 8192,
            },
        ),
        "smollm3-3b": _plain("smollm3", (2048, 11008, 36, 16, 4, 128256), 65536, 5e6, 1e-6, tied=True, eos=128012),
        "granite-3.3-8b": _plain(
            "granite",
            (4096, 12800, 40, 32, 8, 49159),
            *(131072, 1e7, 1e-5, True, 0),
            **_granite(attention=0.0078125, logits=16.0),
        ),
        "granite-3.1-3b-a800m": _plain(
            "granitemoe",
            (1536, 512, 32, 24, 8, 49155),
            *(131072, 1e7, 1e-5, True, 0),
            num_local_experts=40,
            num_experts_per_tok=8,
            **_granite(attention=0.015625, logits=6.0),
        ),
        "exaone-4.0-32b": _plain(
            "exaone4",
            (5120, 27392, 64, 40, 8, 102400),
            *(131072, 1e6, 1e-5, False, 361),
            head_dim=128,
            sliding_window=4096,
            rope_scaling={**_LLAMA3_ROPE, "factor": 16.0},
        ),
        "qwen1.5-moe-a2.7b": _plain(
            "qwen2_moe",
            (2048, 5632, 24, 16, 16, 151936),
            *(8192, 1e6, 1e-6, False, 151643),
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        "glm-4-9b-0414": _plain(
            "glm4",
            (4096, 13696, 40, 32, 2, 151552),
            *(32768, 1e4, 1e-5, False, 151336),
            head_dim=128,
            partial_rotary_factor=0.5,
        ),
        "glm-4.5-air": _plain(
            "glm4_moe",
            (4096, 10944, 46, 96, 8, 151552),
            *(131072, 1e6, 1e-5, False, 151336),
            head_dim=128,
            partial_rotary_factor=0.5,
            attention_bias=True,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        "qwen2.5-7b": _plain("qwen2", (3584, 18944, 28, 28, 4, 152064), 32768, 1e6, 1e-6, tied=False, eos=151645),
        "command-r7b": {
            "model_type": "cohere2",
            "vocab_size": 256000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "logit_scale": 0.25,
            "rope_theta": 5e4,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 132096,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
        },
        "phi-4": _plain(
            "phi3",
            (5120, 17920, 40, 40, 10, 100352),
            *(16384, 250000.0, 1e-5, False, 100265),
            original_max_position_embeddings=16384,
        ),
        "gemma2-2b": {
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        "gemma3-270m": {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
    }
)


class ShapeCheckpoint:
    """A Checkpoint of a config alone: enough for random weights, and nothing to read.

    Attributes:
        config: Hugging Face style config.
        location: for messages.
    """

    def __init__(self, config: Mapping[str, Any], location: str) -> None:
        self.config = config
        self.location = location
        self.tensors: Mapping[str, TensorInfo] = {}
        self.quantised: Mapping[str, PackedInfo] = {}
        self.notes: tuple[str, ...] = ()

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        raise CheckpointError(self.location, "this is a shape without weights", name)

    read_dequantised = read

    def close(self) -> None:
        """Nothing is open."""


def shape_checkpoint(name: str) -> ShapeCheckpoint:
    """The checkpoint of a known shape.

    Raises:
        InvalidRequest: no such shape.
    """
    if name not in SHAPES:
        raise InvalidRequest("shape", name, f"one of {', '.join(SHAPES)}")
    return ShapeCheckpoint(SHAPES[name], f"shape {name}")
