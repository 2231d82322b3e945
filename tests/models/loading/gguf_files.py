"""Writes small GGUF files of every supported architecture, and the Hugging Face tensors that they must read back as."""

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


def _start(architecture: str, *, tied: bool = True, norm_change: Callable | None = None) -> GgufFile:
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


def _attention(
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


def _mlp(file: GgufFile, layer: int, names: dict[str, str]) -> None:
    for stored, expected in names.items():
        shape = (HIDDEN, FFN) if stored == "down" else (FFN, HIDDEN)
        file.add(f"blk.{layer}.ffn_{stored}.weight", f"model.layers.{layer}.{expected}.weight", *shape)


def _split_experts(file: GgufFile, layer: int, names: dict[str, str]) -> None:
    for stored, expected in names.items():
        shape = (HIDDEN, EXPERT_FFN) if stored == "down" else (EXPERT_FFN, HIDDEN)
        values = file.draws.standard_normal((EXPERTS, *shape)).astype(np.float32)
        file.stored[f"blk.{layer}.ffn_{stored}_exps.weight"] = values
        for expert in range(EXPERTS):
            file.expected[f"model.layers.{layer}.{expected.format(expert)}.weight"] = values[expert]


def _norms(file: GgufFile, layer: int, names: dict[str, str], change: Callable | None = None) -> None:
    for stored, expected in names.items():
        size = HEAD if stored in ("attn_q_norm", "attn_k_norm") else HIDDEN
        file.add(f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{expected}.weight", size, change=change)


LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def make_llama() -> GgufFile:
    file = _start("llama")
    for layer in range(LAYERS):
        _attention(file, layer, permuted=True, bias=layer == 1)
        _mlp(file, layer, MLP)
        _norms(file, layer, LLAMA_NORMS)
    return file


def make_qwen2() -> GgufFile:
    file = _start("qwen2")
    for layer in range(LAYERS):
        _attention(file, layer, bias=True, output_bias=False)
        _mlp(file, layer, MLP)
        _norms(file, layer, LLAMA_NORMS)
    return file


def make_qwen3() -> GgufFile:
    file = _start("qwen3", tied=False)
    file.key(attention__key_length=HEAD)
    for layer in range(LAYERS):
        _attention(file, layer)
        _mlp(file, layer, MLP)
        _norms(file, layer, LLAMA_NORMS | QK_NORMS)
    return file


def make_qwen3moe() -> GgufFile:
    file = _start("qwen3moe", tied=False)
    file.key(
        attention__key_length=HEAD, expert_count=EXPERTS, expert_used_count=2, expert_feed_forward_length=EXPERT_FFN
    )
    for layer in range(LAYERS):
        _attention(file, layer)
        _norms(file, layer, LLAMA_NORMS | QK_NORMS)
        file.add(f"blk.{layer}.ffn_gate_inp.weight", f"model.layers.{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        _split_experts(file, layer, {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")})
    return file


def make_gemma2() -> GgufFile:
    file = _gemma("gemma2", {})
    file.key(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    return file


def make_gemma3() -> GgufFile:
    return _gemma("gemma3", QK_NORMS)


def _gemma(architecture: str, own_norms: dict[str, str]) -> GgufFile:
    file = _start(architecture, norm_change=plus_one)
    file.key(attention__key_length=HEAD, attention__sliding_window=8)
    for layer in range(LAYERS):
        _attention(file, layer)
        _mlp(file, layer, MLP)
        norms = {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
        _norms(file, layer, norms | own_norms, change=plus_one)
    return file


LFM2_MLP = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}


def _lfm2(architecture: str) -> GgufFile:
    file = _start(architecture)
    file.key(attention__head_count_kv=[0, KV_HEADS], shortconv__l_cache=3)
    file.add("token_embd_norm.weight", "model.embedding_norm.weight", HIDDEN)
    file.add("blk.0.shortconv.in_proj.weight", "model.layers.0.conv.in_proj.weight", 3 * HIDDEN, HIDDEN)
    file.add("blk.0.shortconv.out_proj.weight", "model.layers.0.conv.out_proj.weight", HIDDEN, HIDDEN)
    file.add("blk.0.shortconv.conv.weight", "model.layers.0.conv.conv.weight", HIDDEN, 1, 3, change=np.squeeze)
    _attention(file, 1)
    _norms(file, 1, {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"})
    for layer in range(LAYERS):
        _norms(file, layer, {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"})
    return file


def make_lfm2() -> GgufFile:
    file = _lfm2("lfm2")
    for layer in range(LAYERS):
        _mlp(file, layer, LFM2_MLP)
    return file


def make_lfm2moe() -> GgufFile:
    file = _lfm2("lfm2moe")
    file.key(
        leading_dense_block_count=1,
        expert_count=EXPERTS,
        expert_used_count=2,
        expert_feed_forward_length=EXPERT_FFN,
        expert_gating_func=2,
    )
    _mlp(file, 0, LFM2_MLP)
    file.add("blk.1.ffn_gate_inp.weight", "model.layers.1.feed_forward.gate.weight", EXPERTS, HIDDEN)
    file.add("blk.1.exp_probs_b.bias", "model.layers.1.feed_forward.expert_bias", EXPERTS)
    _split_experts(
        file,
        1,
        {part: f"feed_forward.experts.{{}}.{name}" for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    )
    return file


def make_gpt_oss() -> GgufFile:
    """Experts appear in the float form; tests of the packed form quantise the stored tensors."""
    file = _start("gpt-oss", tied=False)
    file.key(
        attention__key_length=HEAD,
        attention__sliding_window=8,
        expert_count=EXPERTS,
        expert_used_count=2,
        expert_feed_forward_length=EXPERT_FFN,
        rope__scaling__type="yarn",
        rope__scaling__factor=32.0,
        rope__scaling__original_context_length=4096,
    )
    for layer in range(LAYERS):
        _attention(file, layer, bias=True)
        file.add(f"blk.{layer}.attn_sinks.weight", f"model.layers.{layer}.self_attn.sinks", HEADS)
        norms = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        _norms(file, layer, norms)
        file.add(f"blk.{layer}.ffn_gate_inp.weight", f"model.layers.{layer}.mlp.router.weight", EXPERTS, HIDDEN)
        file.add(f"blk.{layer}.ffn_gate_inp.bias", f"model.layers.{layer}.mlp.router.bias", EXPERTS)
        experts = f"model.layers.{layer}.mlp.experts."
        joined = file.draws.standard_normal((EXPERTS, HIDDEN, 2 * EXPERT_FFN)).astype(np.float32)
        bias = file.draws.standard_normal((EXPERTS, 2 * EXPERT_FFN)).astype(np.float32)
        down = file.draws.standard_normal((EXPERTS, EXPERT_FFN, HIDDEN)).astype(np.float32)
        file.expected |= {f"{experts}gate_up_proj": joined, f"{experts}gate_up_proj_bias": bias}
        file.expected |= {f"{experts}down_proj": down}
        for first, part in enumerate(("gate", "up")):
            stored = np.ascontiguousarray(joined[:, :, first::2].swapaxes(1, 2))
            file.stored[f"blk.{layer}.ffn_{part}_exps.weight"] = stored
            file.stored[f"blk.{layer}.ffn_{part}_exps.bias"] = np.ascontiguousarray(bias[:, first::2])
        file.stored[f"blk.{layer}.ffn_down_exps.weight"] = np.ascontiguousarray(down.swapaxes(1, 2))
        file.add(f"blk.{layer}.ffn_down_exps.bias", f"{experts}down_proj_bias", EXPERTS, HIDDEN)
    return file


MAKERS: dict[str, Callable[[], GgufFile]] = {
    "llama": make_llama,
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    "qwen3moe": make_qwen3moe,
    "gemma2": make_gemma2,
    "gemma3": make_gemma3,
    "lfm2": make_lfm2,
    "lfm2moe": make_lfm2moe,
    "gpt-oss": make_gpt_oss,
}
