"""Writes safetensors files for tests, valid ones and damaged ones."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

LABELS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "float64": "F64",
}


def write_raw(path: Path, header: Any, body: bytes) -> Path:
    """Writes a header (any JSON value, or bytes as they are) and a body."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def describe(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], bytes]:
    """Returns the header and body of a valid file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, array in tensors.items():
        end = len(body) + array.nbytes
        header[name] = {
            "dtype": LABELS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), end],
        }
        body += array.tobytes()
    return header, body


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    return write_raw(path, *describe(tensors))


def write_directory(
    directory: Path, shards: Mapping[str, Mapping[str, np.ndarray]], config: Mapping[str, Any] | None = None
) -> Path:
    """Writes a Hugging Face directory; several shards get an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    for name, tensors in shards.items():
        write_safetensors(directory / name, tensors)
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
