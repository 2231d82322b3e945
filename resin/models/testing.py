"""Tiny models with visible random weights, for tests of model files inside and outside this repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.loading.checkpoint import CheckpointError, TensorInfo
from resin.models.weights import AbstractModel

_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
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

TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
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
    quantised: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise CheckpointError(self.location, "there is no such tensor", name)
        return self.arrays[name]

    def read_dequantised(self, name: str) -> np.ndarray:
        return self.read(name)

    def close(self) -> None:
        pass


def random_checkpoint(config: Mapping[str, Any], *, model: str | None = None, seed: int = 0) -> MemoryCheckpoint:
    """A float32 checkpoint of every tensor that the model declares, with values that no layer can hide.

    Matrices have std 1/sqrt(in), lookups 1, vectors 0.3 around what the declaration calls neutral.

    Args:
        config: Hugging Face style config.
        model: "package.module:Name"; None finds it by `model_type`.
        seed: of the values.
    """
    model_class = find_model_class(config, model)
    abstract = AbstractModel.of(model_class(model_class.Config.from_hf(config), Placement()))
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for declaration in abstract.declarations:
        shapes = declaration.assembly.source_shapes(declaration.shape)
        for name, shape in zip(declaration.sources, shapes, strict=True):
            std = declaration.init.std if len(shape) > 1 else 0.3
            arrays[name] = (declaration.init.mean + std * rng.standard_normal(shape)).astype(np.float32)
    return MemoryCheckpoint(dict(config), arrays)
