"""AWQ: whole numbers in words along the outputs, those of a word in an order of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import TensorInfo, Window
from resin.models.loading.formats.gptq import read_group
from resin.models.loading.formats.packed_tensor import FLOATS, PackedTensor, Read, Tensors, bounds, fault_of_part
from resin.models.loading.formats.words import WORDS, lanes_of, scale_groups, unpack_words, words_around

BITS = 4
# Output of eight that each number of a word is of, from the lowest bits up.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """What the settings say: inputs that share a scale, None for all."""

    group: int | None
    block: tuple[int, int] = (128, 128)

    @classmethod
    def read(cls, given: ConfigReader) -> Self:
        """Raises InvalidRequest for what is not decoded."""
        name, bits = given.find("bits", "w_bit")
        if bits != BITS:
            given.refuse(name, bits, str(BITS))
        given.only("zero_point", True)
        version = given.get("version")
        if version is not None and str(version).lower() != "gemm":
            given.refuse("version", version, "'gemm'")
        given.ignore("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
        return cls(read_group(given))

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for stored, info in tensors.items():
            if stored.endswith(".qweight") and len(info.shape) == 2:
                stem = stored.removesuffix("qweight")
                yield f"{stem}weight", AwqMatrix(stem, info.shape, self.group or info.shape[0])


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """`[out, in]` as words `[in, out / 8]`, zeros `[groups, out / 8]` and scales `[groups, out]`."""

    stem: str
    words: tuple[int, ...]
    group: int

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.stem + name for name in ("qweight", "qzeros", "scales"))

    @property
    def info(self) -> TensorInfo:
        return TensorInfo((self.words[1] * lanes_of(BITS), self.words[0]), "float32")

    @property
    def about(self) -> str:
        return f"AWQ of {BITS} bit"

    def fault(self, tensors: Tensors) -> str | None:
        (outputs, inputs), (words, zeros, scales) = self.info.shape, self.parts
        groups = -(-inputs // self.group)
        return (
            fault_of_part(tensors, words, WORDS)
            or fault_of_part(tensors, zeros, WORDS, (groups, self.words[1]))
            or fault_of_part(tensors, scales, FLOATS, (groups, outputs))
        )

    def decode(self, read: Read, window: Window) -> np.ndarray:
        (first, last), (left, right) = bounds(window, self.info.shape)
        around, within = words_around(first, last, lanes_of(BITS))
        groups = np.arange(left, right) // self.group
        spans = (slice(left, right), slice(0, None))
        codes, zeros = (
            unpack_words(read(name, (span, around)), BITS, axis=1, order=ORDER)[:, within]
            for name, span in zip(self.parts, spans, strict=False)
        )
        return scale_groups(codes, zeros, read(self.parts[2], (slice(0, None), slice(first, last))), groups).T
