"""Packed matrices with random parts, and what they stand for: formulas over single bits, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class PackedFile:
    """One matrix "l.weight".

    Attributes:
        quantisation: the settings.
        tensors: stored under the layer's name "l".
        expected: float64 `[out, in]`.
        beside: parts that only tell of it.
    """

    quantisation: Mapping[str, Any]
    tensors: Tensors
    expected: np.ndarray
    beside: tuple[str, ...] = ()


def _bits(words: np.ndarray, row: int, column: int, place: int, bits: int) -> int:
    return (int(words[row, column]) & 0xFFFFFFFF) >> (place * bits) & ((1 << bits) - 1)


def _words(draws: np.random.Generator, *shape: int) -> np.ndarray:
    return draws.integers(-(2**31), 2**31, shape).astype(np.int32)


def _halves(draws: np.random.Generator, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return draws.uniform(0.01, 0.1, shape).astype(dtype)


def gptq(
    *,
    bits: int = 4,
    group: int = 16,
    inputs: int = 64,
    outputs: int = 24,
    symmetric: bool = False,
    desc_act: bool = False,
    version: int = 1,
    middle: bool = False,
    seed: int = 0,
) -> PackedFile:
    draws = np.random.default_rng(seed)
    lanes, size = 32 // bits, inputs if group == -1 else group
    count = -(-inputs // size)
    words, scales = _words(draws, inputs // lanes, outputs), _halves(draws, count, outputs)
    # Zeros of 1 to the largest, as they are meant; files of version 1 store them less one.
    zeros = draws.integers(1, 1 << bits, (count, outputs))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    stored = zeros if version == 2 or middle else zeros - 1
    packed = np.zeros((count, outputs // lanes), np.uint32)
    for g, o in np.ndindex(zeros.shape):
        packed[g, o // lanes] |= np.uint32(int(stored[g, o]) << (o % lanes * bits))
    groups = draws.permutation(np.arange(inputs) // size) if desc_act else np.arange(inputs) // size
    expected = np.empty((outputs, inputs))
    for o, i in np.ndindex(expected.shape):
        code = _bits(words, i // lanes, o, i % lanes, bits)
        expected[o, i] = (code - int(zeros[groups[i], o])) * float(scales[groups[i], o])
    tensors = {"qweight": words, "qzeros": packed.view(np.int32), "scales": scales}
    if desc_act:
        tensors["g_idx"] = groups.astype(np.int32)
    settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": desc_act, "damp_percent": 0.01}
    kind = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return PackedFile({"quant_method": "gptq", **settings, **kind}, tensors, expected)


def awq(*, group: int = 16, inputs: int = 48, outputs: int = 24, seed: int = 1) -> PackedFile:
    draws = np.random.default_rng(seed)
    size = inputs if group == -1 else group
    words, zeros = _words(draws, inputs, outputs // 8), _words(draws, inputs // size, outputs // 8)
    scales = _halves(draws, inputs // size, outputs)
    place = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # output of eight -> its nibble
    expected = np.empty((outputs, inputs))
    for o, i in np.ndindex(expected.shape):
        code = _bits(words, i, o // 8, place[o % 8], 4)
        zero = _bits(zeros, i // size, o // 8, place[o % 8], 4)
        expected[o, i] = (code - zero) * float(scales[i // size, o])
    tensors = {"qweight": words, "qzeros": zeros, "scales": scales}
    settings = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return PackedFile({"quant_method": "awq", **settings}, tensors, expected)


def compressed(kind: str, weights: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Settings of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    written = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        **written,
        **settings,
    }


def pack_quantized(
    *,
    bits: int = 4,
    groups: int = 3,
    inputs: int = 60,
    outputs: int = 20,
    zeros: str = "",
    act_order: bool = False,
    seed: int = 2,
) -> PackedFile:
    draws = np.random.default_rng(seed)
    lanes, middle = 32 // bits, 1 << (bits - 1)
    words = _words(draws, outputs, -(-inputs // lanes))
    scales = _halves(draws, outputs, groups, dtype=ml_dtypes.bfloat16)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array([outputs, inputs], np.int64)}
    meant = np.zeros((outputs, groups), np.int64)
    if zeros == "packed":
        stored = _words(draws, -(-outputs // lanes), groups)
        for o, g in np.ndindex(meant.shape):
            meant[o, g] = _bits(stored, o // lanes, g, o % lanes, bits) - middle
        tensors["weight_zero_point"] = stored
    elif zeros == "int8":
        meant = draws.integers(-middle, middle, (outputs, groups))
        tensors["weight_zero_point"] = meant.astype(np.int8)
    group_of = np.arange(inputs) // (inputs // groups)
    if act_order:
        group_of = draws.permutation(group_of)
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    expected = np.empty((outputs, inputs))
    for o, i in np.ndindex(expected.shape):
        code = _bits(words, o, i // lanes, i % lanes, bits) - middle
        expected[o, i] = (code - meant[o, group_of[i]]) * float(scales[o, group_of[i]])
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": not zeros,
        "strategy": "group",
        "group_size": inputs // groups,
    }
    return PackedFile(compressed("pack-quantized", weights), tensors, expected)


def eight_bits(
    quantisation: Mapping[str, Any],
    scale_shape: tuple[int, ...],
    *,
    block: tuple[int, int] | None = None,
    dtype: Any = ml_dtypes.float8_e4m3fn,
    scale_dtype: Any = np.float32,
    suffix: str = "_scale",
    zero: bool = False,
    beside: tuple[str, ...] = (),
    shape: tuple[int, int] = (24, 40),
    seed: int = 3,
) -> PackedFile:
    draws = np.random.default_rng(seed)
    values = (draws.standard_normal(shape) * (20 if dtype == np.int8 else 1)).astype(dtype)
    scales = _halves(draws, *scale_shape, dtype=scale_dtype)
    tensors = {"weight": values, f"weight{suffix}": scales, **{name: np.ones(1, np.float32) for name in beside}}
    zeros = np.zeros(scale_shape)
    if zero:
        zeros = draws.integers(-5, 5, scale_shape)
        tensors["weight_zero_point"] = zeros.astype(np.int8)
    expected = np.empty(shape)
    for o, i in np.ndindex(shape):
        place: Any = ()
        if block is not None:
            place = (o // block[0], i // block[1])
        elif scales.size == shape[0]:
            place = (o, 0)[: len(scale_shape)]
        else:
            place = (0,) * len(scale_shape)
        expected[o, i] = (float(values[o, i]) - float(zeros[place])) * float(scales[place])
    return PackedFile(quantisation, tensors, expected, beside)


def nf4(
    *, nested: bool = False, shape: tuple[int, int] = (14, 36), run: int = 64, kind: str = "nf4", seed: int = 4
) -> PackedFile:
    draws = np.random.default_rng(seed)
    count = shape[0] * shape[1]
    values = np.sort(draws.uniform(-1, 1, 16)).astype(np.float32)
    packed = draws.integers(0, 256, (count // 2, 1)).astype(np.uint8)
    runs = -(-count // run)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": run, "dtype": "bfloat16", "shape": list(shape)}
    tensors: Tensors = {"weight": packed, "weight.quant_map": values}
    if nested:
        codes, table = draws.integers(0, 256, runs).astype(np.uint8), draws.uniform(-1, 1, 256).astype(np.float32)
        outer = draws.uniform(0.5, 1, -(-runs // 4)).astype(np.float32)
        tensors |= {"weight.absmax": codes, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.75}
        scales = [float(table[code]) * float(outer[place // 4]) + 0.75 for place, code in enumerate(codes)]
    else:
        tensors["weight.absmax"] = draws.uniform(0.5, 1, runs).astype(np.float32)
        scales = [float(scale) for scale in tensors["weight.absmax"]]
    expected = np.empty(count)
    for place in range(count):
        byte = int(packed[place // 2, 0])
        expected[place] = float(values[byte >> 4 if place % 2 == 0 else byte & 15]) * scales[place // run]
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = text.copy()
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    return PackedFile({"quant_method": "bitsandbytes", **settings}, tensors, expected.reshape(shape))


def int8_rows(*, shape: tuple[int, int] = (14, 36), seed: int = 5) -> PackedFile:
    draws = np.random.default_rng(seed)
    values, largest = (
        draws.integers(-127, 128, shape).astype(np.int8),
        draws.uniform(0.5, 2, shape[0]).astype(np.float32),
    )
    expected = np.array(
        [[float(values[o, i]) * float(largest[o]) / 127 for i in range(shape[1])] for o in range(shape[0])]
    )
    tensors = {"weight": values, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    settings = {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    return PackedFile({"quant_method": "bitsandbytes", **settings}, tensors, expected, ("weight_format",))


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}

MAKERS: Mapping[str, Callable[[], PackedFile]] = {
    "gptq": lambda: gptq(),
    "gptq symmetric": lambda: gptq(symmetric=True),
    "gptq symmetric, zeros as they are": lambda: gptq(symmetric=True, middle=True),
    "gptq with its order": lambda: gptq(desc_act=True),
    "gptq of 8 bits": lambda: gptq(bits=8, outputs=20),
    "gptq without groups": lambda: gptq(group=-1),
    "gptq of groups that end within": lambda: gptq(group=24),
    "gptq 2": lambda: gptq(version=2),
    "awq": lambda: awq(),
    "awq without groups": lambda: awq(group=-1),
    "pack-quantized": lambda: pack_quantized(),
    "pack-quantized of 8 bits": lambda: pack_quantized(bits=8),
    "pack-quantized rows": lambda: pack_quantized(groups=1),
    "pack-quantized with zeros": lambda: pack_quantized(zeros="packed"),
    "pack-quantized with plain zeros": lambda: pack_quantized(zeros="int8"),
    "pack-quantized with its order": lambda: pack_quantized(act_order=True),
    "fp8 a matrix": lambda: eight_bits({**FP8, "activation_scheme": "static"}, (), beside=("input_scale",)),
    "fp8 a matrix, inverse": lambda: eight_bits(
        {**FP8, "weight_block_size": None}, (1,), suffix="_scale_inv", scale_dtype=ml_dtypes.bfloat16
    ),
    "fp8 blocks": lambda: eight_bits(
        {**FP8, "weight_block_size": [16, 16]}, (2, 3), block=(16, 16), suffix="_scale_inv"
    ),
    "fbgemm": lambda: eight_bits(FBGEMM, (24, 1)),
    "float-quantized a matrix": lambda: eight_bits(
        compressed("float-quantized", {**_FLOAT8, "strategy": "tensor"}), (1,), beside=("input_scale",)
    ),
    "float-quantized rows": lambda: eight_bits(
        compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}), (24, 1), scale_dtype=ml_dtypes.bfloat16
    ),
    "float-quantized blocks": lambda: eight_bits(
        compressed("float-quantized", {**_FLOAT8, "strategy": "block", "block_structure": [16, 8]}),
        (2, 5),
        block=(16, 8),
    ),
    "int-quantized rows": lambda: eight_bits(
        compressed("int-quantized", {**_INT8, "strategy": "channel"}), (24, 1), dtype=np.int8
    ),
    "int-quantized with zeros": lambda: eight_bits(
        compressed("int-quantized", {**_INT8, "strategy": "channel", "symmetric": False}),
        (24, 1),
        dtype=np.int8,
        zero=True,
    ),
    "nf4": lambda: nf4(),
    "nf4 of an odd width": lambda: nf4(shape=(12, 33)),
    "nf4 twice": lambda: nf4(nested=True),
    "fp4": lambda: nf4(kind="fp4"),
    "int8": lambda: int8_rows(),
}
