"""The header of a GGUF file: metadata and the place of every tensor, checked before anything is used.

Layout: magic, version, tensor count, metadata count; then key/value pairs; then one record a tensor; then,
aligned, the tensor data. Everything is little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from resin.models.loading.checkpoint import CheckpointError
from resin.plan.extras import require

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT_BYTES = 32
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# Value type code -> little-endian NumPy dtype.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor; `shape` is `[out, in]`, slowest dimension first."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int  # first byte in the file
    size_bytes: int
    part: int = 0  # of a file in parts


@dataclass(frozen=True, slots=True)
class GgufHeader:
    location: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads values one after another and never past the end of the file."""

    def __init__(self, data: np.ndarray, location: str) -> None:
        self.view = data.data
        self.position = 0
        self.location = location

    def take(self, count: int, what: str) -> memoryview:
        end = self.position + count
        if end > len(self.view):
            raise CheckpointError(
                self.location,
                f"{what} at byte {self.position} needs {count} bytes, the file has {len(self.view)} (truncated?)",
            )
        taken = self.view[self.position : end]
        self.position = end
        return taken

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0])

    def text(self, what: str) -> str:
        raw = bytes(self.take(self.number("Q", what), what))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(self.location, f"{what} is not UTF-8 ({error.reason})") from error

    def texts(self, count: int, what: str) -> list[str]:
        # Each text has at least its 8-byte length: a damaged count is found before the loop.
        if count * 8 > len(self.view) - self.position:
            raise CheckpointError(self.location, f"{what} claims {count} texts, more than the file can hold")
        return [self.text(what) for _ in range(count)]

    def value(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind == _STRING:
            return self.text(what)
        if kind in _SCALARS:
            return self._scalars(kind, 1, what)[0]
        if kind != _ARRAY:
            raise CheckpointError(self.location, f"{what} has the unknown value type {kind}")
        kind = self.number("I", what)
        count = self.number("Q", what)
        if kind == _STRING:
            return self.texts(count, what)
        if kind in _SCALARS:
            return self._scalars(kind, count, what)
        raise CheckpointError(self.location, f"{what} is an array of the unsupported value type {kind}")

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        return list(np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist())


def parse_gguf_header(data: np.ndarray, location: str) -> GgufHeader:
    """Parses and checks the header of a mapped GGUF file.

    Args:
        data: the whole file, uint8 `[size]`.
        location: for messages.

    Raises:
        CheckpointError: not a GGUF file, a version or type that is not supported, or a damaged header.
    """
    cursor = _Cursor(data, location)
    magic = bytes(cursor.take(4, "magic"))
    if magic != _MAGIC:
        raise CheckpointError(location, f"is not a GGUF file (starts with {magic!r})")
    version = cursor.number("I", "version")
    if version not in _VERSIONS:
        raise CheckpointError(location, f"GGUF version {version} is not supported (only little-endian 2 and 3)")
    tensor_count = cursor.number("Q", "tensor count")
    metadata_count = cursor.number("Q", "metadata count")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.text("metadata key")
        if key in metadata:
            raise CheckpointError(location, f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    records = [_tensor_record(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(location, f"general.alignment={alignment!r} is not a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(location, metadata, _place_tensors(records, data_start, alignment, len(data), location))


def _tensor_record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("tensor name")
    what = f"record of tensor {name!r}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(cursor.location, f"has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}", name)
    fastest_first = [cursor.number("Q", what) for _ in range(dimensions)]
    return name, tuple(reversed(fastest_first)), cursor.number("I", what), cursor.number("Q", what)


def _place_tensors(
    records: list[tuple[str, tuple[int, ...], int, int]],
    data_start: int,
    alignment: int,
    file_bytes: int,
    location: str,
) -> dict[str, GgufTensor]:
    require("serve", "gguf")
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, GgufTensor] = {}
    for name, shape, code, offset in records:
        if name in tensors:
            raise CheckpointError(location, "appears twice", name)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(location, f"has the unknown type {code}", name) from None
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) == 0 or shape[-1] % block_values:
            raise CheckpointError(location, f"shape {shape} does not divide into {kind.name} blocks", name)
        if offset % alignment:
            raise CheckpointError(location, f"offset {offset} is not a multiple of {alignment}", name)
        start, size = data_start + offset, prod(shape) // block_values * block_bytes
        if start + size > file_bytes:
            raise CheckpointError(
                location, f"ends at byte {start + size}, the file has {file_bytes} (truncated?)", name
            )
        tensors[name] = GgufTensor(name, kind, shape, start, size)
    end, previous = data_start, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise CheckpointError(location, f"overlaps tensor {previous!r}", tensor.name)
        end, previous = tensor.start + tensor.size_bytes, tensor.name
    return tensors
