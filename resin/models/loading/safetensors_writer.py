"""Writes safetensors files and the index of a sharded checkpoint, one tensor in memory at a time."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from resin.models.loading.checkpoint import CheckpointError, TensorInfo
from resin.models.loading.safetensors import DTYPES

_LABELS = {dtype.name: label for label, dtype in DTYPES.items()}
_ALIGNMENT_BYTES = 8


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes arrays to one file; returns its path."""
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in tensors.items()}
    return stream_safetensors(path, infos, lambda name: tensors[name])


def stream_safetensors(path: Path, infos: Mapping[str, TensorInfo], read: Callable[[str], np.ndarray]) -> Path:
    """Writes the tensors that `infos` describes, asking for them one after another.

    Raises:
        CheckpointError: a dtype that the format does not have, or an array that is not what `infos` says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, info in infos.items():
        if info.dtype not in _LABELS:
            raise CheckpointError(path, f"dtype {info.dtype} has no form in safetensors", name)
        start, end = end, end + prod(info.shape) * np.dtype(DTYPES[_LABELS[info.dtype]]).itemsize
        header[name] = {"dtype": _LABELS[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, info in infos.items():
            array = np.ascontiguousarray(read(name))
            if (array.shape, array.dtype.name) != (tuple(info.shape), info.dtype):
                raise CheckpointError(path, f"is {array.dtype.name} {array.shape}, expected {info}", name)
            file.write(array.reshape(-1).view(np.uint8).data)
    return path


def write_index(directory: Path, shards: Mapping[str, Iterable[str]]) -> Path:
    """Writes the index that tells which shard holds which tensor."""
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    return path
