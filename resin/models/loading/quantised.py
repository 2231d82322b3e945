"""Packed tensors of a checkpoint: which settings say how, and which tensors are there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from resin.models.config_reader import ConfigReader
from resin.models.loading.checkpoint import PackedInfo
from resin.models.loading.formats.awq import Awq
from resin.models.loading.formats.bitsandbytes import BitsAndBytes
from resin.models.loading.formats.compressed import CompressedTensors
from resin.models.loading.formats.gptq import Gptq
from resin.models.loading.formats.mxfp4 import Mxfp4Experts, find_mxfp4
from resin.models.loading.formats.packed_tensor import PackedTensor, Packing, Read, Tensors
from resin.models.loading.formats.scaled import find_scaled

_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Scaled:
    """FP8 with scales beside it, and nothing else."""

    block: tuple[int, int] = _BLOCK

    def find(self, tensors: Tensors, read: Read) -> Iterator[tuple[str, PackedTensor]]:
        yield from ()


def _read_fp8(given: ConfigReader) -> Scaled:
    given.choice("activation_scheme", allowed=("dynamic", "static"), default="dynamic")
    given.only("fmt", "e4m3")
    given.only("kv_cache_scheme", None)
    given.ignore("scale_fmt", "dequantize")
    return Scaled(_read_block(given))


def _read_fbgemm(given: ConfigReader) -> Scaled:
    given.ignore("activation_scale_ub")
    return Scaled()


def _read_block(given: ConfigReader) -> tuple[int, int]:
    """Rows and columns that share one FP8 scale (128 by 128 unless the settings say otherwise)."""
    block = given.integers("weight_block_size", low=1)
    if block is None:
        return _BLOCK
    if len(block) != 2:
        given.refuse("weight_block_size", list(block), "two sizes")
    return (block[0], block[1])


METHODS: Mapping[str, Callable[[ConfigReader], Packing]] = MappingProxyType(
    {
        "awq": Awq.read,
        "bitsandbytes": BitsAndBytes.read,
        "compressed-tensors": CompressedTensors.read,
        "fbgemm_fp8": _read_fbgemm,
        "fp8": _read_fp8,
        "gptq": Gptq.read,
        "mxfp4": lambda given: Scaled(),
    }
)
# Of these, those whose matrices any model computes with once they are decoded.
DECODED = tuple(name for name in METHODS if name != "mxfp4")


def packing_of(config: Mapping[str, Any]) -> Packing:
    """How a config says that its tensors are packed; a method that is not known says nothing here.

    Raises:
        InvalidRequest: settings of its method that are not decoded.
    """
    given = ConfigReader.of(config).section("quantization_config")
    if given is None:
        return Scaled()
    read = METHODS.get(str(given.get("quant_method")))
    return Scaled(_read_block(given)) if read is None else read(given)


def find_packed(tensors: Tensors, config: Mapping[str, Any], read: Read) -> dict[str, PackedTensor]:
    """Tensors that exist only in packed form, by the names of their plain forms: MXFP4 and FP8 by the names of their
    parts, others as the settings say.

    Raises:
        InvalidRequest: as `packing_of`.
    """
    packing = packing_of(config)
    found: dict[str, PackedTensor] = dict(find_mxfp4(tensors))
    found.update(find_scaled(tensors, packing.block))
    found.update(packing.find(tensors, read))
    return found


def infos_of(packed: Mapping[str, PackedTensor]) -> dict[str, PackedInfo]:
    """What a checkpoint tells of them."""
    return {name: PackedInfo(*tensor.info, tensor.parts) for name, tensor in packed.items()}


def notes_of(packed: Mapping[str, PackedTensor]) -> tuple[str, ...]:
    """A line for those that are decoded while they load; MXFP4 stays packed where a model computes with it."""
    counts = Counter(tensor.about for tensor in packed.values() if not isinstance(tensor, Mxfp4Experts))
    if not counts:
        return ()
    kinds = ", ".join(f"{count} of {kind}" if len(counts) > 1 else kind for kind, count in counts.items())
    return (f"{counts.total()} packed matrices ({kinds}) are decoded while they load, and served as plain numbers",)
