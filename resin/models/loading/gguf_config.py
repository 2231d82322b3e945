"""GGUF metadata -> the settings that a Hugging Face `config.json` of the same model holds."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.gguf_architectures import ARCHITECTURES, TURN_A_PART, Config
from resin.models.loading.gguf_header import GgufHeader
from resin.models.loading.gguf_metadata import Metadata

# What these settings of any architecture must be, where a file has them: with other values the model is another one.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation_sparsity_scale": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
# Tensors: what divides the frequencies of long and of short contexts.
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
# What says nothing about the computation.
_HARMLESS = ("rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "vocab_size")


def translate_gguf_config(header: GgufHeader) -> Config:
    """Returns a Hugging Face style config for the model in a GGUF file.

    Raises:
        CheckpointError: the architecture is not supported, or one of its keys is absent, malformed, unknown, or asks
            for something that is not computed.
    """
    metadata = Metadata(header)
    special = ARCHITECTURES.get(metadata.architecture)
    if special is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            header.location, f"architecture {metadata.architecture!r} is not supported (supported: {known})"
        )
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(header.location, f"metadata general.type is {kind!r}, expected 'model'")
    config = _common(metadata)
    special(metadata, config)
    metadata.refuse_unread(f"architecture {metadata.architecture!r}", _HARMLESS, _NEUTRAL)
    return config


def _common(metadata: Metadata) -> Config:
    header = metadata.header
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(header.location, "is missing or not a matrix", "token_embd.weight")
    # A layer has several tensors: a damaged count is found before lists of that length are made.
    layers = metadata.integer("block_count", high=max(len(header.tensors), 1))
    heads = metadata.same("attention.head_count", layers)
    hidden = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", default=max(hidden // heads, 1))
    metadata.only("attention.value_length", head_dim)
    config: Config = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, layers, heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", low=0),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope_parameters(metadata, head_dim),
    }
    if metadata.get("feed_forward_length") is not None:
        config["intermediate_size"] = metadata.same("feed_forward_length", layers)
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    for gguf_name, name in names.items():
        value = header.metadata.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if isinstance(value, int):
            config[name] = value
    return config


def _kv_heads(metadata: Metadata, layers: int, heads: int) -> int:
    if metadata.get("attention.head_count_kv") is None:
        return heads
    # LFM2 says 0 for its convolutions.
    counts = set(metadata.per_layer("attention.head_count_kv", layers)) - {0}
    if len(counts) > 1:
        metadata.refuse("attention.head_count_kv", metadata["attention.head_count_kv"], "the same for every layer")
    return counts.pop() if counts else heads


def _rope_parameters(metadata: Metadata, head_dim: int) -> Config:
    """Of heads that turn whole, or by a part of their dimensions in architectures that do so."""
    if metadata.architecture not in TURN_A_PART:
        metadata.only("rope.dimension_count", head_dim)
        return _rope_scaling(metadata)
    turning = metadata.integer("rope.dimension_count", default=head_dim)
    if turning > head_dim:
        size = "attention.key_length or embedding_length / attention.head_count"
        metadata.refuse("rope.dimension_count", turning, f"at most {size}, which is {head_dim}")
    return {**_rope_scaling(metadata), "partial_rotary_factor": turning / head_dim}


def _rope_scaling(metadata: Metadata) -> Config:
    """As llama.cpp reads it: a factor without a type is linear, and files of 2023 have it under an older name.

    Of LongRoPE, the divisors are tensors of the file.
    """
    theta = metadata.number("rope.freq_base", default=10000.0, above=1)
    if not {LONG_DIVISORS, SHORT_DIVISORS}.isdisjoint(metadata.header.tensors):
        metadata.choice("rope.scaling.type", allowed=("none", "linear", "longrope"), default="linear")
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "attention_factor": metadata.number("rope.scaling.attn_factor", default=1.0, above=0),
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length", default=metadata.integer("context_length")
            ),
        }
    factors = [metadata.number(key, default=0.0, low=0) for key in ("rope.scaling.factor", "rope.scale_linear")]
    factor = factors[0] or factors[1]
    kind = metadata.choice("rope.scaling.type", allowed=("none", "linear", "yarn"), default="linear")
    if kind != "yarn":
        metadata.only("rope.scaling.attn_factor", 1)
        if kind == "linear" and factor not in (0, 1):
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        return {"rope_type": "default", "rope_theta": theta}
    if factor == 0:
        metadata.refuse(
            "rope.scaling.factor", metadata.get("rope.scaling.factor"), "a number above 0, as rope.scaling.type is yarn"
        )
    rope: Config = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(
            "rope.scaling.original_context_length", default=metadata.integer("context_length")
        ),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", default=32.0, above=0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", default=1.0, above=0),
    }
    attention = metadata.number("rope.scaling.attn_factor", default=1.0, above=0)
    if attention != 1:
        # It multiplies what follows from the factor.
        rope["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
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
