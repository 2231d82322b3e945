"""bitsandbytes: four bits a number that stand for one of sixteen values, or INT8 with a scale a row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import TensorInfo, Window
from resin.models.loading.formats.packed_tensor import PackedTensor, Read, Tensors, bounds, fault_of_part
from resin.models.loading.formats.scaled import ScaledMatrix

_STATE = ".quant_state.bitsandbytes__"
_UNUSED = (
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    *("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules", "llm_int8_threshold"),
    *("load_in_4bit", "load_in_8bit"),
)


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The settings say nothing that the tensors do not."""

    block: tuple[int, int] = (128, 128)

    @classmethod
    def read(cls, given: ConfigReader) -> Self:
        """Raises InvalidRequest for what is not decoded."""
        given.only("bnb_4bit_quant_storage", "uint8")
        given.ignore(*_UNUSED)
        return cls()

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for stored, info in tensors.items():
            name, _, kind = stored.partition(_STATE)
            if kind in ("nf4", "fp4") and name in tensors:
                yield name, NibbleTensor.of(name, stored, read(stored))
            scale = stored.removesuffix("weight") + "SCB"
            if stored.endswith(".weight") and info.dtype == "int8" and scale in tensors:
                layout = stored + "_format"
                beside = (layout,) if layout in tensors else ()
                shape = tensors[scale].shape
                if not beside or not read(layout).any():  # others are the layouts of one kind of core
                    yield (
                        stored,
                        ScaledMatrix(stored, scale, info.shape, shape, self.block, unit=1 / 127, beside=beside),
                    )


@dataclass(frozen=True, slots=True)
class NibbleTensor:
    """Bytes of two numbers, the first in the upper bits, with a scale for each run of them.

    Attributes:
        name: of the bytes, and of the tensor.
        state: tensor that tells the rest.
        shape: of the tensor.
        run: numbers that share a scale.
        scale_run, scale_offset: of the scales where they are packed themselves: a byte each, with a scale for each
            run of them, and what is added to all; None where they are plain numbers.
    """

    name: str
    state: str
    shape: tuple[int, ...]
    run: int
    scale_run: int | None
    scale_offset: float

    @classmethod
    def of(cls, name: str, state: str, text: np.ndarray) -> Self:
        """As its state says; one that says nothing understandable has no shape."""
        try:
            said: Any = json.loads(bytes(text.astype(np.uint8)))
            nested = said.get("nested_blocksize")
            return cls(
                name,
                state,
                tuple(int(size) for size in said["shape"]),
                int(said["blocksize"]),
                None if nested is None else int(nested),
                float(said.get("nested_offset", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(name, state, (), 0, None, 0.0)

    @property
    def parts(self) -> tuple[str, ...]:
        nested = () if self.scale_run is None else (f"{self.name}.nested_absmax", f"{self.name}.nested_quant_map")
        return (self.name, f"{self.name}.absmax", f"{self.name}.quant_map", *nested, self.state)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, "float32")

    @property
    def about(self) -> str:
        return "bitsandbytes of 4 bit"

    def fault(self, tensors: Tensors) -> str | None:
        count = prod(self.shape)
        if len(self.shape) != 2 or self.run < 1 or (self.scale_run is not None and self.scale_run < 1):
            return f"{self.state} does not tell the shape of a matrix and the size of its runs"
        runs = -(-count // self.run)
        is_nested = self.scale_run is not None
        return (
            fault_of_part(tensors, self.name, ("uint8",), sized=-(-count // 2))
            or fault_of_part(tensors, f"{self.name}.absmax", ("uint8",) if is_nested else ("float32",), sized=runs)
            or fault_of_part(tensors, f"{self.name}.quant_map", ("float32",), (16,))
            or (
                fault_of_part(tensors, self.parts[3], ("float32",), sized=-(-runs // (self.scale_run or 1)))
                or fault_of_part(tensors, self.parts[4], ("float32",), (256,))
                if is_nested
                else None
            )
        )

    def decode(self, read: Read, window: Window) -> np.ndarray:
        (first, last), columns = bounds(window, self.shape)
        width = self.shape[1]
        start, stop = first * width, last * width
        packed = read(self.name).reshape(-1)[start // 2 : -(-stop // 2)]
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[start % 2 :][: stop - start]
        runs = np.arange(start // self.run, -(-stop // self.run))
        scales = np.repeat(self._scales(read, runs), self.run)[start % self.run :][: stop - start]
        values = read(f"{self.name}.quant_map")[codes] * scales
        return values.reshape(-1, width)[:, slice(*columns)]

    def _scales(self, read: Read, runs: np.ndarray) -> np.ndarray:
        stored = read(f"{self.name}.absmax").reshape(-1)[runs]
        if self.scale_run is None:
            return stored
        scales, values = (read(part).reshape(-1) for part in self.parts[3:5])
        return values[stored] * scales[runs // self.scale_run] + np.float32(self.scale_offset)
