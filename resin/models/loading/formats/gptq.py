"""GPTQ: whole numbers in words along the inputs, with a scale and a zero for each group of inputs and each output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import TensorInfo, Window
from resin.models.loading.formats.packed_tensor import FLOATS, PackedTensor, Read, Tensors, bounds, fault_of_part
from resin.models.loading.formats.words import WORDS, lanes_of, read_groups, scale_groups, unpack_words, words_around

_UNUSED = (
    *(
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
    ),
    *("damp_percent", "dataset", "desc_act", "disable_exllama", "exllama_config", "hyb_act", "lm_head"),
    *(
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "modules_in_block_to_quantize",
    ),
    *("module_name_preceding_first_block", "mse", "pad_token_id", "quantizer", "static_groups", "tokenizer"),
    *("true_sequential", "use_cuda_fp16", "use_exllama"),
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """What the settings say.

    Attributes:
        bits: of a number.
        group: inputs that share a scale; None for all.
        is_symmetric: every zero is the middle.
        zeros_less_one: zeros are stored less one.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    zeros_less_one: bool
    block: tuple[int, int] = (128, 128)

    @classmethod
    def read(cls, given: ConfigReader) -> Self:
        """Raises InvalidRequest for what is not decoded."""
        bits = given.integer("bits")
        if bits not in (2, 4, 8):
            given.refuse("bits", bits, "2, 4 or 8")
        kind = given.choice("checkpoint_format", allowed=("gptq", "gptq_v2"), default="gptq")
        given.only("is_marlin_format", False)
        given.only("pack_dtype", "int32")
        rules = given.section("dynamic")
        if any(not rule.startswith("-:") for rule in rules or ()):
            given.refuse("dynamic", list(rules or ()), "rules that leave modules out alone, which begin with '-:'")
        given.ignore(*_UNUSED)
        return cls(bits, read_group(given), given.flag("sym", default=True), kind == "gptq")

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        for stored, info in tensors.items():
            if stored.endswith(".qweight") and len(info.shape) == 2:
                stem = stored.removesuffix("qweight")
                yield f"{stem}weight", GptqMatrix(self, stem, info.shape, f"{stem}g_idx" in tensors)


def read_group(given: ConfigReader) -> int | None:
    """`group_size`; None for all inputs, which is -1."""
    group = given.integer("group_size", "q_group_size", default=128, low=-1)
    if group == 0:
        given.refuse("group_size", group, "a whole number above 0, or -1 for all inputs")
    return None if group == -1 else group


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """`[out, in]` as words `[in / lanes, out]`, zeros `[groups, out / lanes]`, scales `[groups, out]`.

    `g_idx` `[in]` tells the group of each input where groups are no runs of them.
    """

    settings: Gptq
    stem: str
    words: tuple[int, ...]
    has_groups: bool

    @property
    def parts(self) -> tuple[str, ...]:
        names = ("qweight", "qzeros", "scales", *(("g_idx",) if self.has_groups else ()))
        return tuple(self.stem + name for name in names)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo((self.words[1], self.words[0] * lanes_of(self.settings.bits)), "float32")

    @property
    def about(self) -> str:
        return f"GPTQ of {self.settings.bits} bit"

    def fault(self, tensors: Tensors) -> str | None:
        outputs, inputs = self.info.shape
        groups = -(-inputs // (self.settings.group or inputs))
        packed = -(-outputs // lanes_of(self.settings.bits))
        return (
            fault_of_part(tensors, f"{self.stem}qweight", WORDS)
            or fault_of_part(tensors, f"{self.stem}qzeros", WORDS, (groups, packed))
            or fault_of_part(tensors, f"{self.stem}scales", FLOATS, (groups, outputs))
            or (fault_of_part(tensors, f"{self.stem}g_idx", ("int32", "int64"), (inputs,)) if self.has_groups else None)
        )

    def decode(self, read: Read, window: Window) -> np.ndarray:
        bits, lanes = self.settings.bits, lanes_of(self.settings.bits)
        (first, last), (left, right) = bounds(window, self.info.shape)
        around, within = words_around(left, right, lanes)
        codes = unpack_words(read(f"{self.stem}qweight", (around, slice(first, last))), bits, axis=0)[within]
        scales = read(f"{self.stem}scales", (slice(0, None), slice(first, last)))
        if self.has_groups:
            groups = read_groups(read, f"{self.stem}g_idx", left, right, len(scales))
        else:
            groups = np.arange(left, right) // (self.settings.group or self.info.shape[1])
        return scale_groups(codes, self._zeros(read, first, last), scales, groups).T

    def _zeros(self, read: Read, first: int, last: int) -> np.ndarray:
        """uint8 `[groups, last - first]`. One is added to whole words, as it was taken from them: a zero of 0 borrows.

        Symmetric files of newer writers store the middle itself, whatever format they name.
        """
        bits, lanes = self.settings.bits, lanes_of(self.settings.bits)
        around, within = words_around(first, last, lanes)
        words = np.ascontiguousarray(read(f"{self.stem}qzeros", (slice(0, None), around))).view(np.uint32)
        middle = np.uint32(sum(1 << (lane * bits + bits - 1) for lane in range(lanes)))
        is_middle = self.settings.is_symmetric and bool((words == middle).all())
        if self.settings.zeros_less_one and not is_middle:
            words = words + np.uint32(sum(1 << (lane * bits) for lane in range(lanes)))
        return unpack_words(words, bits, axis=1)[:, within]
