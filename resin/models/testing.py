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
from resin.models.loading.checkpoint import CheckpointError, PackedInfo, TensorInfo, Window, cut
from resin.models.loading.quantised import find_packed, infos_of
from resin.models.loading.safetensors_writer import write_safetensors
from resin.models.tiny_configs import TINY_CONFIGS as TINY_CONFIGS
from resin.models.weights import AbstractModel

FP8_BLOCK = 128


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
    quantised: Mapping[str, PackedInfo] = field(init=False)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._packed = find_packed(self.tensors, self.config, self.read)
        self.quantised = infos_of(self._packed)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(array.shape, str(array.dtype)) for name, array in self.arrays.items()}

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        if name not in self.arrays:
            raise CheckpointError(self.location, "there is no such tensor", name)
        return cut(self.arrays[name], window)

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        tensor = self._packed.get(name)
        return self.read(name, window) if tensor is None else tensor.decode(self.read, window)

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
    packed = {part for info in checkpoint.quantised.values() for part in info.parts}
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
