"""GGUF metadata -> the settings that a Hugging Face `config.json` of the same model holds."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.gguf_header import GgufHeader

Config = dict[str, Any]


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(key, value, "a finite number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(key, value, "a whole number")
        return int(value)

    def _refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        found = "is missing" if value is None else f"is {value!r}, expected {expected}"
        raise CheckpointError(self.header.location, f"metadata {self.architecture}.{key} {found}")

    def integers(self, key: str, count: int) -> list[int]:
        """One integer a layer, whether stored once or as a list."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count or not all(isinstance(item, int) and item >= 0 for item in values):
            raise CheckpointError(
                self.header.location,
                f"metadata {self.architecture}.{key} is not one integer for each of {count} layers",
            )
        return values


def translate_gguf_config(header: GgufHeader) -> Config:
    """Returns a Hugging Face style config for the model in a GGUF file.

    Raises:
        CheckpointError: the architecture is not supported, or a key that it needs is absent or malformed.
    """
    metadata = _Metadata(header)
    special = _ARCHITECTURES.get(metadata.architecture)
    if special is None:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise CheckpointError(
            header.location, f"architecture {metadata.architecture!r} is not supported (supported: {known})"
        )
    config = _common(metadata)
    special(metadata, config)
    return config


def _common(metadata: _Metadata) -> Config:
    header = metadata.header
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(header.location, "is missing or not a matrix", "token_embd.weight")
    layers = metadata.integer("block_count")
    # A layer has several tensors: a damaged count is found before lists of that length are made.
    if not 0 < layers <= len(header.tensors):
        raise CheckpointError(header.location, f"metadata {metadata.architecture}.block_count is {layers}")
    heads = max(metadata.integers("attention.head_count", layers), default=0)
    if heads == 0:
        raise CheckpointError(header.location, f"metadata {metadata.architecture}.attention.head_count is 0")
    hidden = metadata.integer("embedding_length")
    has_kv_heads = metadata.get("attention.head_count_kv") is not None
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": max(metadata.integers("feed_forward_length", layers))
        if metadata.get("feed_forward_length") is not None
        else 0,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(metadata.integers("attention.head_count_kv", layers)) if has_kv_heads else heads,
        "head_dim": metadata.integer("attention.key_length", hidden // heads),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope_parameters(metadata),
    }
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    for gguf_name, name in names.items():
        value = header.metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if isinstance(value, int):
            config[name] = value
    return config


def _rope_parameters(metadata: _Metadata) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    kind = metadata.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    elif kind != "none":
        raise CheckpointError(metadata.header.location, f"rope scaling {kind!r} is not supported (linear, yarn)")
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return rope


def fit_llama3_rope(divisors: np.ndarray, theta: float, original_positions: int = 8192) -> Config:
    """Finds the llama3 scaling settings behind the per-frequency divisors that a GGUF file stores.

    With s the blend of unscaled and scaled frequency, 1/divisor = s + (1 - s)/factor, and s is a straight line in
    1/wavelength: s = (original/wavelength - low)/(high - low). The fastest frequencies have divisor 1, the slowest
    have divisor `factor`.

    Args:
        divisors: float `[head_dim / 2]`.
        theta: rope base.
        original_positions: context length before scaling; only its ratio to `low` and `high` matters.

    Raises:
        ValueError: the divisors do not follow the llama3 rule.
    """
    divisors = divisors.astype(np.float64)
    factor = float(divisors.max())
    if not np.isfinite(divisors).all() or divisors.min() <= 0:
        raise ValueError("divisors must be positive")
    if factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    frequencies = theta ** (-np.arange(len(divisors)) / len(divisors))
    turns = original_positions * frequencies / (2 * np.pi)  # original / wavelength
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    blended = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if blended.sum() < 2:
        raise ValueError("too few blended frequencies to recover the llama3 settings")
    slope, offset = np.polyfit(turns[blended], smooth[blended], 1)
    low, high = round(-offset / slope, 3), round((1 - offset) / slope, 3)
    again = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / (again + (1 - again) / factor), divisors, rtol=1e-3):
        raise ValueError("the divisors do not follow the llama3 rule")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original_positions,
    }


def _llama(metadata: _Metadata, config: Config) -> None:
    config |= {"model_type": "llama", "hidden_act": "silu"}
    if metadata.get("expert_count", 0):
        raise CheckpointError(metadata.header.location, "llama with experts (Mixtral) is not supported")


def _qwen3(metadata: _Metadata, config: Config) -> None:
    config |= {"model_type": "qwen3", "hidden_act": "silu"}


def _qwen3moe(metadata: _Metadata, config: Config) -> None:
    config |= {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


# Gemma 3 27B scales its queries by hidden/heads instead of the head size, and no key says so: the layer count does.
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN_LAYERS = 6


def _gemma3(metadata: _Metadata, config: Config) -> None:
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    is_27b = layers == _GEMMA3_27B_LAYERS
    local_theta = metadata.number("rope.freq_base_swa", 10000.0)
    config |= {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA3_PATTERN_LAYERS else "full_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "attn_logit_softcapping": None,
    }


def _lfm2(metadata: _Metadata, config: Config) -> None:
    kv_heads = metadata.integers("attention.head_count_kv", config["num_hidden_layers"])
    config |= {
        "model_type": "lfm2",
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,  # feed_forward_length is the final width already
    }


def _lfm2moe(metadata: _Metadata, config: Config) -> None:
    _lfm2(metadata, config)
    config |= {
        "model_type": "lfm2_moe",
        "num_dense_layers": metadata.integer("leading_dense_block_count"),
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "use_expert_bias": any(".exp_probs_b" in name for name in metadata.header.tensors),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _gpt_oss(metadata: _Metadata, config: Config) -> None:
    layers = config["num_hidden_layers"]
    config["rope_parameters"]["truncate"] = False
    config |= {
        "model_type": "gpt_oss",
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


_ARCHITECTURES: dict[str, Callable[[_Metadata, Config], None]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2moe,
    "gpt-oss": _gpt_oss,
}
