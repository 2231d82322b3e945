"""Tiny models with visible random weights, for tests of model files inside and outside this repository."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from resin.models.declare import ByteInit, Declaration, Placement
from resin.models.families import read_config
from resin.models.loading.checkpoint import CheckpointError, TensorInfo, Window, cut
from resin.models.loading.quantised import dequantise, find_quantised, packed_parts
from resin.models.loading.safetensors_writer import write_safetensors
from resin.models.weights import AbstractModel

FP8_BLOCK = 128

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


@dataclass
class MemoryCheckpoint:
    """A Checkpoint over arrays in memory.

    Attributes:
        config: Hugging Face style config.
        arrays: tensors by checkpoint name.
    """

    config: Mapping[str, Any]
    arrays: dict[str, np.ndarray]
    location: str = "memory"
    quantised: Mapping[str, TensorInfo] = field(init=False)

    def __post_init__(self) -> None:
        self.quantised = find_quantised(self.tensors)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        if name not in self.arrays:
            raise CheckpointError(self.location, "there is no such tensor", name)
        return cut(self.arrays[name], window)

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        if name not in self.quantised:
            return self.read(name, window)
        values, scales = (self.read(part) for part in packed_parts(name, self.tensors))
        return dequantise(values, scales, window, self.config)

    def close(self) -> None:
        pass


def random_checkpoint(config: Mapping[str, Any], *, model: str | None = None, seed: int = 0) -> MemoryCheckpoint:
    """A float32 checkpoint of every tensor that the model declares, with values that no layer can hide.

    Matrices have std 1/sqrt(in), lookups 1, vectors 0.3 around what the declaration calls neutral. A tensor's values
    depend on its name, its shape and the seed alone.

    Args:
        config: Hugging Face style config.
        model: "package.module:Name"; None finds it by `model_type`.
        seed: of the values.
    """
    model_class, parsed = read_config(config, model)
    abstract = AbstractModel.of(model_class(parsed, Placement()))
    arrays: dict[str, np.ndarray] = {}
    for declaration in abstract.declarations:
        shapes = declaration.assembly.source_shapes(declaration.shape)
        for name, shape in zip(declaration.sources, shapes, strict=True):
            if name in arrays:  # of another weight, made of the same tensor
                continue
            rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
            arrays[name] = _random_tensor(declaration, rng.standard_normal(shape))
    return MemoryCheckpoint(dict(config), arrays)


def _random_tensor(declaration: Declaration, normal: np.ndarray) -> np.ndarray:
    init = declaration.init
    mean = init.mean if init.stored_mean is None else init.stored_mean
    if isinstance(init, ByteInit):
        return np.clip(np.rint(mean + init.std * normal), 0, 255).astype(np.uint8)
    std = init.std if normal.ndim > 1 else 0.3
    return (mean + std * normal).astype(np.float32)


def dequantised_checkpoint(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """The same model with every packed tensor as float32, as a checkpoint that was never quantised stores it."""
    packed = {part for name in checkpoint.quantised for part in packed_parts(name, checkpoint.tensors)}
    arrays = {name: array for name, array in checkpoint.arrays.items() if name not in packed}
    arrays |= {name: checkpoint.read_dequantised(name).astype(np.float32) for name in checkpoint.quantised}
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    return MemoryCheckpoint(config, arrays, checkpoint.location)


def fp8_checkpoint(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """The same model with every linear layer's matrix as float8 and one scale for a block of 128 x 128."""
    arrays: dict[str, np.ndarray] = {}
    for name, array in checkpoint.arrays.items():
        if array.ndim != 2 or not name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            arrays[name] = array
            continue
        rows, columns = (-(-size // FP8_BLOCK) for size in array.shape)
        padded = np.zeros((rows * FP8_BLOCK, columns * FP8_BLOCK), np.float32)
        padded[: array.shape[0], : array.shape[1]] = array
        blocks = padded.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scales = np.abs(blocks).max(axis=(1, 3)) / float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
        scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)[: array.shape[0], : array.shape[1]]
        arrays[name] = scaled.astype(ml_dtypes.float8_e4m3fn)
        arrays[f"{name}_scale_inv"] = scales.astype(np.float32)
    quantisation = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    return MemoryCheckpoint({**checkpoint.config, "quantization_config": quantisation}, arrays)


def write_checkpoint(directory: Path, checkpoint: MemoryCheckpoint) -> Path:
    """Writes a checkpoint as a Hugging Face directory with one weight file; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(checkpoint.config), indent=1))
    write_safetensors(directory / "model.safetensors", checkpoint.arrays)
    return directory
