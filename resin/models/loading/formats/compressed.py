"""compressed-tensors: packed whole numbers in words along the inputs, or 8-bit numbers with scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import TensorInfo, Window
from resin.models.loading.formats.packed_tensor import FLOATS, PackedTensor, Read, Tensors, bounds, fault_of_part
from resin.models.loading.formats.scaled import find_scaled
from resin.models.loading.formats.words import WORDS, lanes_of, read_groups, scale_groups, unpack_words, words_around

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_UNUSED = ("global_compression_ratio", "quantization_status", "version")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """What the settings say: bits of packed numbers, and the block of scales that are a grid."""

    bits: int
    block: tuple[int, int] = (128, 128)

    @classmethod
    def read(cls, given: ConfigReader) -> Self:
        """Raises InvalidRequest for what is not decoded."""
        given.choice("format", allowed=FORMATS)
        given.only("kv_cache_scheme", None)
        given.only("transform_config", {})
        sparsity = given.section("sparsity_config")
        if sparsity is not None and sparsity.get("format") not in (None, "dense"):
            sparsity.refuse("format", sparsity["format"], "'dense'")
        given.ignore("ignore", *_UNUSED)
        groups = given.section("config_groups") or ConfigReader({})
        found = [_read_weights(group) for name in groups if (group := groups.section(name)) is not None]
        if not found or any(one != found[0] for one in found):
            given.refuse("config_groups", dict(groups), "groups whose weights are packed alike, and one at least")
        return cls(*found[0])

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        yield from find_scaled(tensors, self.block, ("int8",))
        for stored, info in tensors.items():
            shape = stored.replace("weight_packed", "weight_shape")
            if stored.endswith(".weight_packed") and len(info.shape) == 2 and shape in tensors:
                stem = stored.removesuffix("weight_packed")
                sizes = read(shape).reshape(-1)
                outputs, inputs = (int(size) for size in sizes) if len(sizes) == 2 else (0, 0)
                beside = tuple(part for part in ("weight_zero_point", "weight_g_idx") if stem + part in tensors)
                yield (
                    f"{stem}weight",
                    PackedMatrix(self.bits, stem, (outputs, inputs), _scales_of(tensors, stem), beside),
                )


def _read_weights(group: ConfigReader) -> tuple[int, tuple[int, int]]:
    """Bits and block of a group's weights; how activations are rounded is left to those who wish to."""
    weights = group.section("weights")
    if weights is None:
        group.refuse("weights", None, "an object of settings")
    kind = weights.choice("type", allowed=("int", "float"))
    bits = weights.integer("num_bits")
    if bits not in ((4, 8) if kind == "int" else (8,)):
        weights.refuse("num_bits", bits, "4 or 8" if kind == "int" else "8")
    weights.choice("strategy", allowed=("tensor", "channel", "group", "block"))
    block: Any = weights.integers("block_structure", low=1) or (128, 128)
    if len(block) != 2:
        weights.refuse("block_structure", list(block), "two sizes")
    return bits, (block[0], block[1])


def _scales_of(tensors: Tensors, stem: str) -> int:
    """Scales a row."""
    info = tensors.get(f"{stem}weight_scale")
    return info.shape[1] if info is not None and len(info.shape) == 2 else 1


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`[out, in]` as words `[out, in / lanes]` of numbers moved up by half their range, and scales `[out, groups]`.

    Zeros, if any, are words `[out / lanes, groups]` of numbers moved up alike, so that the difference stays, or int8.
    """

    bits: int
    stem: str
    shape: tuple[int, int]
    groups: int
    beside: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        names = ("weight_packed", "weight_scale", "weight_shape", *self.beside)
        return tuple(self.stem + name for name in names)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, "float32")

    @property
    def about(self) -> str:
        return f"compressed-tensors of {self.bits} bit"

    def fault(self, tensors: Tensors) -> str | None:
        outputs, inputs = self.shape
        lanes, scales = lanes_of(self.bits), (outputs, self.groups)
        zero = f"{self.stem}weight_zero_point"
        is_int8 = zero in tensors and tensors[zero].dtype == "int8"
        zeros = scales if is_int8 else (-(-outputs // lanes), self.groups)
        return (
            fault_of_part(tensors, f"{self.stem}weight_packed", WORDS, (outputs, -(-inputs // lanes)))
            or fault_of_part(tensors, f"{self.stem}weight_scale", FLOATS, scales)
            or (
                f"{self.stem}weight_scale has {self.groups} scales for {inputs} inputs"
                if inputs % self.groups
                else None
            )
            or (fault_of_part(tensors, zero, (*WORDS, "int8"), zeros) if zero in tensors else None)
            or (
                fault_of_part(tensors, f"{self.stem}weight_g_idx", ("int32", "int64"), (inputs,))
                if "weight_g_idx" in self.beside
                else None
            )
        )

    def decode(self, read: Read, window: Window) -> np.ndarray:
        (first, last), (left, right) = bounds(window, self.shape)
        around, within = words_around(left, right, lanes_of(self.bits))
        words = read(f"{self.stem}weight_packed", (slice(first, last), around))
        codes = unpack_words(words, self.bits, axis=1)[:, within]
        if "weight_g_idx" in self.beside:
            groups = read_groups(read, f"{self.stem}weight_g_idx", left, right, self.groups)
        else:
            groups = np.arange(left, right) // (self.shape[1] // self.groups)
        scales = read(f"{self.stem}weight_scale", (slice(first, last),))
        return scale_groups(codes.T, self._zeros(read, first, last).T, scales.T, groups).T

    def _zeros(self, read: Read, first: int, last: int) -> np.ndarray:
        """`[last - first, groups]`, moved up as the numbers are."""
        middle = 1 << (self.bits - 1)
        if "weight_zero_point" not in self.beside:
            return np.full((last - first, self.groups), middle, np.uint8)
        name = f"{self.stem}weight_zero_point"
        around, within = words_around(first, last, lanes_of(self.bits))
        stored = read(name)
        if stored.dtype == np.int8:
            return stored[first:last].astype(np.int16) + middle
        return unpack_words(stored[around], self.bits, axis=0)[within]
