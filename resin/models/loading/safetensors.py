"""Reads safetensors files, alone or as the shards of a Hugging Face directory.

A file is an 8-byte little-endian header length, a JSON header (tensor name -> dtype, shape, byte range), and the
bytes, which the ranges must cover without gap or overlap. The header is checked here; tensors are views of the
mapped file, so loading costs no anonymous memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from resin.models.loading.checkpoint import CheckpointError, PackedInfo, TensorInfo, Window, cut
from resin.models.loading.formats.packed_tensor import PackedFault
from resin.models.loading.mapped import map_file
from resin.models.loading.quantised import find_packed, infos_of, notes_of

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit that the format's own library sets
# What NumPy can address; larger sizes could only belong to empty tensors of a damaged file.
_MAX_DIMENSIONS = 32
_MAX_VALUES = 2**59
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("|b1"),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Place of one tensor; `start` and `end` are bytes of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One mapped and checked file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = map_file(path)
        self.entries = parse_safetensors_header(self.data, str(path))

    def read(self, name: str) -> np.ndarray:
        """Returns a read-only view of the mapped bytes."""
        entry = self.entries[name]
        return np.ndarray(entry.shape, entry.dtype, self.data.data[entry.start : entry.end])


class SafetensorsCheckpoint:
    """A set of safetensors files with the config beside them, as a `Checkpoint`."""

    def __init__(self, location: Path, config: Mapping[str, Any], places: Mapping[str, SafetensorsFile]) -> None:
        """Args:
        location: for messages.
        config: contents of config.json.
        places: tensor name -> the file that holds it.
        """
        self.location = str(location)
        self.config = config
        self._places: Mapping[str, SafetensorsFile] = places
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(file.entries[name].shape, file.entries[name].dtype.name) for name, file in places.items()
        }
        self._packed = find_packed(self.tensors, config, self.read)
        for tensor in self._packed.values():
            fault, values = tensor.fault(self.tensors), tensor.parts[0]
            if fault is not None:
                raise CheckpointError(places[values].path, fault, values)
        self.quantised: Mapping[str, PackedInfo] = infos_of(self._packed)
        self.notes = notes_of(self._packed)

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        file = self._places.get(name)
        if file is None:
            reason = "the checkpoint is closed" if name in self.tensors else "is not in the checkpoint"
            raise CheckpointError(self.location, reason, name)
        return cut(file.read(name), window)

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        tensor = self._packed.get(name)
        if tensor is None:
            return self.read(name, window)
        try:
            return tensor.decode(self.read, window)
        except PackedFault as error:
            raise CheckpointError(self.location, str(error), tensor.parts[0]) from error

    def close(self) -> None:
        self._places = {}


def parse_safetensors_header(data: np.ndarray, location: str) -> dict[str, SafetensorsEntry]:
    """Parses and checks the header of a mapped file.

    Args:
        data: the whole file, uint8 `[size]`.
        location: for messages.

    Raises:
        CheckpointError: a truncated or damaged file, or a dtype that is not supported.
    """
    if len(data) < _LENGTH_BYTES:
        raise CheckpointError(location, f"has {len(data)} bytes, too few for a safetensors header (truncated?)")
    length = int(data[:_LENGTH_BYTES].view("<u8")[0])
    body = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or body > len(data):
        raise CheckpointError(
            location, f"claims a header of {length} bytes, the file has {len(data)} (truncated, or not safetensors)"
        )
    try:
        header = json.loads(bytes(data[_LENGTH_BYTES:body]), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(location, f"header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(location, "header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(name, value, body, location) for name, value in header.items()}
    _check_cover(entries, body, len(data), location)
    return entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _parse_entry(name: str, value: Any, body: int, location: str) -> SafetensorsEntry:
    if not isinstance(value, dict):
        raise CheckpointError(location, "header entry is not an object", name)
    label, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    dtype = DTYPES.get(label) if isinstance(label, str) else None
    if dtype is None:
        raise CheckpointError(location, f"dtype {label!r} is not supported (supported: {', '.join(DTYPES)})", name)
    if not _is_sizes(shape) or len(shape) > _MAX_DIMENSIONS or prod(max(size, 1) for size in shape) > _MAX_VALUES:
        raise CheckpointError(location, f"shape {shape!r} is not a list of sizes", name)
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(location, f"data_offsets {offsets!r} is not a pair of byte positions", name)
    begin, end = offsets
    expected = prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise CheckpointError(
            location, f"has {end - begin} bytes, expected {expected} for {label} of shape {tuple(shape)}", name
        )
    return SafetensorsEntry(dtype, tuple(shape), body + begin, body + end)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(entries: Mapping[str, SafetensorsEntry], body: int, file_bytes: int, location: str) -> None:
    end, previous = body, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > file_bytes:
            raise CheckpointError(location, f"ends at byte {entry.end}, the file has {file_bytes} (truncated?)", name)
        if entry.start != end:
            relation = "overlaps" if entry.start < end else "leaves a gap after"
            raise CheckpointError(location, f"starts at byte {entry.start} and {relation} {previous}", name)
        end, previous = entry.end, repr(name)
    if end != file_bytes:
        raise CheckpointError(location, f"has {file_bytes - end} bytes after {previous} that belong to no tensor")
