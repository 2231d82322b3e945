"""Reads a GGUF file as if it were a Hugging Face checkpoint: names, shapes, row orders and config translated."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from resin.models.loading.checkpoint import CheckpointError, PackedInfo, TensorInfo, Window, cut
from resin.models.loading.formats.mxfp4 import MXFP4_VALUES
from resin.models.loading.gguf_config import LONG_DIVISORS, SHORT_DIVISORS, fit_llama3_rope, translate_gguf_config
from resin.models.loading.gguf_header import GgufTensor
from resin.models.loading.gguf_names import (
    FITTED_ROPE,
    Change,
    JoinedStacks,
    PackedExperts,
    PlainExperts,
    Rule,
    Stored,
    name_gguf_tensors,
)
from resin.models.loading.gguf_split import open_parts
from resin.models.loading.quantised import find_packed, infos_of

_FLOATS: Mapping[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_UNSUPPORTED = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0", "NVFP4"})
_MXFP4_BYTES = 17  # one scale, then 16 bytes of two values


class GgufCheckpoint:
    """A GGUF file, or one in parts, as a `Checkpoint`. Quantised tensors read as float32, the others as stored."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._parts, self._header = open_parts(path)
        for tensor in self._header.tensors.values():
            if tensor.type.name in _UNSUPPORTED:
                raise CheckpointError(self.location, f"type {tensor.type.name} is not supported", tensor.name)
        self.config: Mapping[str, Any] = self._translate_config()
        self._rules = name_gguf_tensors(self._header, self.config)
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(rule) for name, rule in self._rules.items()}
        self._packed = find_packed(self.tensors, {}, self.read)
        self.quantised: Mapping[str, PackedInfo] = infos_of(self._packed)
        self.notes: tuple[str, ...] = ()
        # As a published config says it. A file with some experts of another type is decoded while it loads.
        if self.quantised and len(self.quantised) == 2 * self.config["num_hidden_layers"]:
            self.config = {**self.config, "quantization_config": {"quant_method": "mxfp4"}}

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's own key/value pairs (tokenizer and chat template among them)."""
        return self._header.metadata

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        rule = self._rules.get(name)
        if rule is None:
            raise CheckpointError(self.location, "is not in the file", name)
        if isinstance(rule, Stored):
            return self._read_stored(rule, window)
        experts, *others = window or (slice(None),)
        if isinstance(rule, JoinedStacks):
            stacks = [self._header.tensors[source] for source in rule.sources]
            values = np.concatenate([self._floats(self._bytes(one)[experts], one) for one in stacks], axis=1)
        elif isinstance(rule, PackedExperts):
            values = self._read_packed(rule, experts)
        else:
            values = self._read_plain_experts(rule, experts)
        return cut(values, (slice(None), *others))

    def read_dequantised(self, name: str, window: Window = ()) -> np.ndarray:
        tensor = self._packed.get(name)
        return self.read(name, window) if tensor is None else tensor.decode(self.read, window)

    def close(self) -> None:
        self._parts = []

    def _translate_config(self) -> dict[str, Any]:
        config = translate_gguf_config(self._header)
        rope = config["rope_parameters"]
        if rope.get("rope_type") == "longrope":
            named = {"long_factor": LONG_DIVISORS, "short_factor": SHORT_DIVISORS}
            factors = {name: self._divisors(tensor, config).tolist() for name, tensor in named.items()}
            return {**config, "rope_parameters": {**rope, **factors}}
        freqs = self._header.tensors.get("rope_freqs.weight")
        if freqs is None:
            return config
        divisors = self._divisors(freqs.name, config)
        if (divisors == 1).all():
            return config
        if config["model_type"] not in FITTED_ROPE or rope["rope_type"] != "default":
            known = ", ".join(sorted(FITTED_ROPE))
            raise CheckpointError(self.location, f"is read without rope.scaling alone, in {known}", freqs.name)
        try:
            return {**config, "rope_parameters": fit_llama3_rope(divisors, rope["rope_theta"])}
        except ValueError as error:
            raise CheckpointError(self.location, str(error), freqs.name) from error

    def _divisors(self, name: str, config: Mapping[str, Any]) -> np.ndarray:
        """Of the frequencies of a head's pairs that turn."""
        tensor = self._header.tensors.get(name)
        if tensor is None:
            raise CheckpointError(self.location, "is missing", name)
        divisors = self._floats(self._bytes(tensor), tensor)
        pairs = int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", 1)) // 2
        if divisors.shape != (pairs,):
            raise CheckpointError(self.location, f"shape {tensor.shape} is not one divisor a pair of head_dim", name)
        return divisors

    def _info(self, rule: Rule) -> TensorInfo:
        tensors = self._header.tensors
        if isinstance(rule, Stored):
            return self._stored_info(rule)
        first = tensors[rule.sources[0]]
        if isinstance(rule, JoinedStacks):
            if len(first.shape) != 3:
                raise CheckpointError(self.location, f"shape {first.shape} is not a stack of matrices", first.name)
            experts, rows, width = first.shape
            return TensorInfo((experts, rows * len(rule.sources), width), self._dtype(first))
        expected = 2 if isinstance(rule, PlainExperts) and not rule.transposed else 3
        if len(first.shape) != expected:
            raise CheckpointError(self.location, f"shape {first.shape} has not {expected} dimensions", first.name)
        experts, rows = first.shape[0], first.shape[1] * len(rule.sources)
        if isinstance(rule, PackedExperts):
            groups = first.shape[2] // MXFP4_VALUES
            return TensorInfo(
                (experts, rows, groups, 16) if rule.part == "blocks" else (experts, rows, groups), "uint8"
            )
        return TensorInfo((experts, first.shape[2], rows) if rule.transposed else (experts, rows), self._dtype(first))

    @staticmethod
    def _dtype(tensor: GgufTensor) -> str:
        return _FLOATS.get(tensor.type, np.dtype("<f4")).name

    def _stored_info(self, rule: Stored) -> TensorInfo:
        tensor = self._header.tensors[rule.source]
        shape = tensor.shape
        if rule.expert is not None:
            if len(shape) != 3:
                raise CheckpointError(self.location, f"shape {shape} is not a stack of matrices", tensor.name)
            shape = shape[1:]
        if rule.rows is not None:
            if rule.rows.stop > shape[0]:
                raise CheckpointError(self.location, f"shape {shape} has no {rule.rows.stop} rows", tensor.name)
            shape = (rule.rows.stop - rule.rows.start, *shape[1:])
        if rule.change is Change.UNPERMUTE_HEADS:
            if len(shape) != 2 and (len(shape) != 1 or tensor.type not in _FLOATS):
                raise CheckpointError(self.location, f"{tensor.type.name} of shape {shape} has no rows", tensor.name)
            if rule.heads == 0 or shape[0] % (2 * rule.heads):
                raise CheckpointError(
                    self.location, f"{shape[0]} rows do not divide into {rule.heads} heads", tensor.name
                )
        if rule.change is Change.CONV_CHANNEL:
            if len(shape) < 2 or math.prod(shape) != shape[0] * shape[-1]:
                raise CheckpointError(self.location, f"shape {shape} is not one row a channel", tensor.name)
            shape = (shape[0], 1, shape[-1])
        if rule.change is Change.ONE_ROW:
            shape = (1, math.prod(shape))
        return TensorInfo(shape, self._dtype(tensor))

    def _bytes(self, tensor: GgufTensor, expert: int | None = None) -> np.ndarray:
        """Stored bytes, uint8 `[..., rows, row bytes]`: rows are independent in every format."""
        if not self._parts:
            raise CheckpointError(self.location, "the checkpoint is closed", tensor.name)
        stored = self._parts[tensor.part][tensor.start : tensor.start + tensor.size_bytes]
        rows = stored.reshape(*tensor.shape[:-1], -1)
        return rows if expert is None else rows[expert]

    def _floats(self, rows: np.ndarray, tensor: GgufTensor) -> np.ndarray:
        dtype = _FLOATS.get(tensor.type)
        if dtype is not None:
            return rows.view(dtype)
        # Scales of a damaged file may be infinite; the result then holds NaN, which the loader's checks can see.
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(dequantize(rows, tensor.type))

    def _read_stored(self, rule: Stored, window: Window) -> np.ndarray:
        tensor = self._header.tensors[rule.source]
        rows = self._bytes(tensor, rule.expert)
        if rule.rows is not None:
            each = 1 if rows.ndim > 1 else rows.nbytes // tensor.shape[0]  # a vector is one row of bytes
            rows = rows[rule.rows.start * each : rule.rows.stop * each]
        if rows.ndim > 1 and window:  # only what holds the window's rows is decoded
            unit = tensor.shape[0] // rule.heads if rule.change is Change.UNPERMUTE_HEADS else 1
            first = window[0].start // unit * unit
            rows = rows[first : -(-window[0].stop // unit) * unit]
            window = (slice(window[0].start - first, window[0].stop - first), *window[1:])
        if rule.change is Change.UNPERMUTE_HEADS:
            # A bias is one row of values, a matrix has one row an output.
            pairs = tensor.shape[0] // rule.heads // 2
            halves = rows.reshape(-1, pairs, 2, rows[0].nbytes if rows.ndim > 1 else rows.nbytes // tensor.shape[0])
            rows = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
        return cut(self._changed(rule, tensor, rows), window)

    def _changed(self, rule: Stored, tensor: GgufTensor, rows: np.ndarray) -> np.ndarray:
        values = self._floats(rows, tensor)
        if rule.change is Change.MINUS_ONE:
            with np.errstate(invalid="ignore"):
                return values - np.ones((), values.dtype)
        if rule.change is Change.CONV_CHANNEL:
            return values.reshape(values.shape[0], 1, -1)
        return values.reshape(1, -1) if rule.change is Change.ONE_ROW else values

    def _read_packed(self, rule: PackedExperts, chosen: slice) -> np.ndarray:
        shape = self._header.tensors[rule.sources[0]].shape
        rows, groups, count = shape[1], shape[2] // MXFP4_VALUES, len(rule.sources)
        experts = len(range(shape[0])[chosen])
        tail = (groups, 16) if rule.part == "blocks" else (groups,)
        result = np.empty((experts, rows, count, *tail), np.uint8)
        for index, source in enumerate(rule.sources):
            stored = self._bytes(self._header.tensors[source])[chosen].reshape(experts, rows, groups, _MXFP4_BYTES)
            if rule.part == "scales":
                result[:, :, index] = stored[..., 0]
                continue
            # Stored byte i holds values i (low) and i + 16 (high); Hugging Face byte i holds values 2i and 2i + 1.
            packed = stored[..., 1:]
            low, high = packed & 15, packed >> 4
            result[:, :, index, :, :8] = low[..., 0::2] | low[..., 1::2] << 4
            result[:, :, index, :, 8:] = high[..., 0::2] | high[..., 1::2] << 4
        return result.reshape(experts, rows * count, *tail)

    def _read_plain_experts(self, rule: PlainExperts, chosen: slice) -> np.ndarray:
        stored = [self._header.tensors[source] for source in rule.sources]
        parts = [self._floats(self._bytes(tensor)[chosen], tensor) for tensor in stored]
        joined = np.stack(parts, axis=2)
        merged = joined.reshape(parts[0].shape[0], math.prod(joined.shape[1:3]), *parts[0].shape[2:])
        return np.ascontiguousarray(merged.swapaxes(1, 2)) if rule.transposed else merged
