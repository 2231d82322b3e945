"""Writes small GGUF files, and knows the Hugging Face tensors that they must read back as."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

Tensors = dict[str, np.ndarray]
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, FFN, VOCAB, EXPERTS, EXPERT_FFN = 64, 2, 4, 2, 16, 96, 40, 3, 32


class GgufFile:
    """Collects what a test file holds: metadata, stored tensors and the tensors that a reader must show."""

    def __init__(self, architecture: str, seed: int = 0) -> None:
        self.architecture = architecture
        self.draws = np.random.default_rng(seed)
        self.metadata: dict[str, Any] = {}
        self.stored: Tensors = {}
        self.expected: Tensors = {}

    def key(self, **values: Any) -> None:
        for name, value in values.items():
            self.metadata[f"{self.architecture}.{name.replace('__', '.')}"] = value

    def add(
        self, stored: str, expected: str, *shape: int, change: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> None:
        """Adds a random tensor; `change` makes the stored form from the Hugging Face one."""
        values = self.draws.standard_normal(shape).astype(np.float32)
        self.expected[expected] = values
        self.stored[stored] = values if change is None else change(values)

    def write(self, path: Path, kinds: dict[str, GGMLQuantizationType] | None = None) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_uint32(key, value)
        for name, values in self.stored.items():
            kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
            if kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def permute(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """What llama.cpp's converter does to the rows of q and k: halves of a head become interleaved pairs."""

    def change(values: np.ndarray) -> np.ndarray:
        head = values.shape[0] // heads
        order = [h * head + half * (head // 2) + i for h in range(heads) for i in range(head // 2) for half in (0, 1)]
        return np.ascontiguousarray(values[order])

    return change


def plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.float32(1)


def start(architecture: str, *, tied: bool = True, norm_change: Callable | None = None) -> GgufFile:
    file = GgufFile(architecture)
    file.key(
        block_count=LAYERS,
        context_length=512,
        embedding_length=HIDDEN,
        feed_forward_length=FFN,
        attention__head_count=HEADS,
        attention__head_count_kv=KV_HEADS,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__freq_base=50000.0,
    )
    file.metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    file.add("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN)
    if not architecture.startswith("lfm2"):
        file.add("output_norm.weight", "model.norm.weight", HIDDEN, change=norm_change)
    if not tied:
        file.add("output.weight", "lm_head.weight", VOCAB, HIDDEN)
    return file


def attention(
    file: GgufFile, layer: int, *, permuted: bool = False, bias: bool = False, output_bias: bool = True
) -> None:
    stored, expected = f"blk.{layer}.attn_", f"model.layers.{layer}.self_attn."
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        change = permute(heads) if permuted and part != "v" else None
        file.add(f"{stored}{part}.weight", f"{expected}{part}_proj.weight", heads * HEAD, HIDDEN, change=change)
        if bias:
            file.add(f"{stored}{part}.bias", f"{expected}{part}_proj.bias", heads * HEAD, change=change)
    output = "out_proj" if file.architecture.startswith("lfm2") else "o_proj"
    file.add(f"{stored}output.weight", f"{expected}{output}.weight", HIDDEN, HEADS * HEAD)
    if bias and output_bias:
        file.add(f"{stored}output.bias", f"{expected}{output}.bias", HIDDEN)


def mlp(file: GgufFile, layer: int, names: dict[str, str]) -> None:
    for stored, expected in names.items():
        shape = (HIDDEN, FFN) if stored.startswith("down") else (FFN, HIDDEN)
        file.add(f"blk.{layer}.ffn_{stored}.weight", f"model.layers.{layer}.{expected}.weight", *shape)


def split_experts(
    file: GgufFile, layer: int, names: dict[str, str], *, width: int = EXPERT_FFN, listed: bool = False
) -> None:
    """Adds experts that Hugging Face names one by one; `listed` stores them so too, as files before stacks."""
    for stored, expected in names.items():
        shape = (HIDDEN, width) if stored == "down" else (width, HIDDEN)
        values = file.draws.standard_normal((EXPERTS, *shape)).astype(np.float32)
        if not listed:
            file.stored[f"blk.{layer}.ffn_{stored}_exps.weight"] = values
        for expert in range(EXPERTS):
            file.expected[f"model.layers.{layer}.{expected.format(expert)}.weight"] = values[expert]
            if listed:
                file.stored[f"blk.{layer}.ffn_{stored}.{expert}.weight"] = values[expert]


def norms(file: GgufFile, layer: int, names: dict[str, str], change: Callable | None = None) -> None:
    for stored, expected in names.items():
        size = HEAD if stored in ("attn_q_norm", "attn_k_norm") else HIDDEN
        file.add(f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{expected}.weight", size, change=change)
