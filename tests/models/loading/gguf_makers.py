"""A small GGUF file of every supported architecture."""

from collections.abc import Callable

import numpy as np

from tests.models.loading.gguf_files import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    GgufFile,
    attention,
    mlp,
    norms,
    plus_one,
    split_experts,
    start,
)

LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
PARTS = ("gate", "up", "down")
NUMBERED = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def make_llama() -> GgufFile:
    file = start("llama")
    for layer in range(LAYERS):
        attention(file, layer, permuted=True, bias=layer == 1)
        mlp(file, layer, MLP)
        norms(file, layer, LLAMA_NORMS)
    return file


def make_mixtral(listed: bool = False) -> GgufFile:
    file = start("llama", tied=False)
    file.key(expert_count=EXPERTS, expert_used_count=2)
    for layer in range(LAYERS):
        attention(file, layer, permuted=True)
        norms(file, layer, LLAMA_NORMS)
        file.add(
            f"blk.{layer}.ffn_gate_inp.weight", f"model.layers.{layer}.block_sparse_moe.gate.weight", EXPERTS, HIDDEN
        )
        names = {part: f"block_sparse_moe.experts.{{}}.{name}" for part, name in NUMBERED}
        split_experts(file, layer, names, width=FFN, listed=listed)
    return file


def make_olmo3() -> GgufFile:
    file = make_olmo2()
    file.key(attention__sliding_window=8, attention__sliding_window_pattern=[True, False])
    return file


def make_smollm3() -> GgufFile:
    file = start("smollm3")
    for layer in range(LAYERS):
        attention(file, layer, permuted=True)
        mlp(file, layer, MLP)
        norms(file, layer, LLAMA_NORMS)
    return file


def make_exaone4() -> GgufFile:
    file = start("exaone4", tied=False)
    file.key(attention__sliding_window=8, attention__sliding_window_pattern=[True, False])
    for layer in range(LAYERS):
        attention(file, layer)
        mlp(file, layer, MLP)
        norms(file, layer, NORMS_AFTER | QK_NORMS)
    return file


GRANITE = {"attention__scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 8.0}


def make_granite() -> GgufFile:
    file = start("granite")
    file.key(**GRANITE)
    for layer in range(LAYERS):
        attention(file, layer, permuted=True)
        mlp(file, layer, MLP)
        norms(file, layer, LLAMA_NORMS)
    return file


def make_granitemoe() -> GgufFile:
    file = start("granitemoe")
    file.key(expert_count=EXPERTS, expert_used_count=2, **GRANITE)
    for layer in range(LAYERS):
        attention(file, layer, permuted=True)
        norms(file, layer, LLAMA_NORMS)
        block = f"model.layers.{layer}.block_sparse_moe."
        file.add(f"blk.{layer}.ffn_gate_inp.weight", f"{block}router.layer.weight", EXPERTS, HIDDEN)
        joined = file.draws.standard_normal((EXPERTS, 2 * FFN, HIDDEN)).astype(np.float32)
        file.expected[f"{block}input_linear.weight"] = joined
        for part, rows in (("gate", joined[:, :FFN]), ("up", joined[:, FFN:])):
            file.stored[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(rows)
        file.add(f"blk.{layer}.ffn_down_exps.weight", f"{block}output_linear.weight", EXPERTS, HIDDEN, FFN)
    return file


def make_qwen2moe() -> GgufFile:
    file = start("qwen2moe", tied=False)
    file.key(
        expert_count=EXPERTS,
        expert_used_count=2,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_feed_forward_length=FFN,
    )
    for layer in range(LAYERS):
        attention(file, layer, bias=True, output_bias=False)
        norms(file, layer, LLAMA_NORMS)
        block = f"model.layers.{layer}.mlp."
        file.add(f"blk.{layer}.ffn_gate_inp.weight", f"{block}gate.weight", EXPERTS, HIDDEN)
        # Files of either age store one row, as a vector or as a matrix.
        squeeze = np.squeeze if layer else None
        file.add(
            f"blk.{layer}.ffn_gate_inp_shexp.weight", f"{block}shared_expert_gate.weight", 1, HIDDEN, change=squeeze
        )
        mlp(file, layer, {f"{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in PARTS})
        split_experts(file, layer, {part: f"mlp.experts.{{}}.{part}_proj" for part in PARTS})
    return file


def _glm(architecture: str, own_norms: dict[str, str], *, joined: bool) -> GgufFile:
    file = start(architecture, tied=False)
    file.key(rope__dimension_count=HEAD // 2)
    for layer in range(LAYERS):
        attention(file, layer, bias=True, output_bias=False)
        norms(file, layer, LLAMA_NORMS | own_norms)
        for kind in ("weight", "bias") if joined else ():
            parts = [file.stored.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            file.stored[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
        block = f"model.layers.{layer}.mlp."
        file.add(f"blk.{layer}.ffn_up.weight", f"{block}gate_up_proj.weight", 2 * FFN, HIDDEN)
        file.add(f"blk.{layer}.ffn_down.weight", f"{block}down_proj.weight", HIDDEN, FFN)
    return file


def make_chatglm() -> GgufFile:
    return _glm("chatglm", {}, joined=True)


def make_glm4() -> GgufFile:
    own = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
    return _glm("glm4", own, joined=False)


def make_glm4moe() -> GgufFile:
    file = start("glm4moe", tied=False)
    file.key(
        block_count=LAYERS + 1,  # the last one guesses further tokens
        rope__dimension_count=HEAD // 2,
        expert_count=EXPERTS,
        expert_used_count=2,
        expert_feed_forward_length=EXPERT_FFN,
        expert_shared_count=2,
        expert_gating_func=2,
        expert_weights_scale=1.5,
        expert_weights_norm=True,
        leading_dense_block_count=1,
        nextn_predict_layers=1,
    )
    for layer in range(LAYERS):
        attention(file, layer, bias=True, output_bias=False)
        own = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        norms(file, layer, own | QK_NORMS)
    mlp(file, 0, MLP)
    file.add("blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight", EXPERTS, HIDDEN)
    file.add("blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.e_score_correction_bias", EXPERTS)
    split_experts(file, 1, {part: f"mlp.experts.{{}}.{part}_proj" for part in PARTS})
    for part in PARTS:
        shape = (HIDDEN, 2 * EXPERT_FFN) if part == "down" else (2 * EXPERT_FFN, HIDDEN)
        file.add(f"blk.1.ffn_{part}_shexp.weight", f"model.layers.1.mlp.shared_experts.{part}_proj.weight", *shape)
    drafts = ("attn_norm", "nextn.enorm", "nextn.eh_proj")
    file.stored |= {f"blk.{LAYERS}.{name}.weight": np.ones(HIDDEN, np.float32) for name in drafts}
    return file


def make_olmo2() -> GgufFile:
    file = start("olmo2", tied=False)
    for layer in range(LAYERS):
        attention(file, layer)
        mlp(file, layer, MLP)
        norms(file, layer, NORMS_AFTER)
        for part, heads in (("q", HEADS), ("k", KV_HEADS)):
            name = f"model.layers.{layer}.self_attn.{part}_norm.weight"
            file.add(f"blk.{layer}.attn_{part}_norm.weight", name, heads * HEAD)
    return file


def make_qwen2() -> GgufFile:
    file = start("qwen2")
    for layer in range(LAYERS):
        attention(file, layer, bias=True, output_bias=False)
        mlp(file, layer, MLP)
        norms(file, layer, LLAMA_NORMS)
    return file


def make_qwen3() -> GgufFile:
    file = start("qwen3", tied=False)
    file.key(attention__key_length=HEAD)
    for layer in range(LAYERS):
        attention(file, layer)
        mlp(file, layer, MLP)
        norms(file, layer, LLAMA_NORMS | QK_NORMS)
    return file


def make_qwen3moe() -> GgufFile:
    file = start("qwen3moe", tied=False)
    file.key(
        attention__key_length=HEAD, expert_count=EXPERTS, expert_used_count=2, expert_feed_forward_length=EXPERT_FFN
    )
    for layer in range(LAYERS):
        attention(file, layer)
        norms(file, layer, LLAMA_NORMS | QK_NORMS)
        file.add(f"blk.{layer}.ffn_gate_inp.weight", f"model.layers.{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        split_experts(file, layer, {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")})
    return file


def make_gemma2() -> GgufFile:
    file = _gemma("gemma2", {})
    file.key(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    return file


def make_gemma3() -> GgufFile:
    return _gemma("gemma3", QK_NORMS)


def _gemma(architecture: str, own_norms: dict[str, str]) -> GgufFile:
    file = start(architecture, norm_change=plus_one)
    file.key(attention__key_length=HEAD, attention__sliding_window=8)
    for layer in range(LAYERS):
        attention(file, layer)
        mlp(file, layer, MLP)
        own = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            **NORMS_AFTER,
        }
        norms(file, layer, own | own_norms, change=plus_one)
    return file


def make_command_r() -> GgufFile:
    file = _cohere("command-r")
    for layer in range(LAYERS):
        attention(file, layer, bias=True)
        for part, heads in (("q", HEADS), ("k", KV_HEADS)):
            expected = f"model.layers.{layer}.self_attn.{part}_norm.weight"
            file.add(f"blk.{layer}.attn_{part}_norm.weight", expected, heads, HEAD)
    return file


def make_cohere2() -> GgufFile:
    file = _cohere("cohere2")
    file.key(attention__sliding_window=8)
    for layer in range(LAYERS):
        attention(file, layer)
    return file


def _cohere(architecture: str) -> GgufFile:
    file = start(architecture)
    epsilon = file.metadata.pop(f"{architecture}.attention.layer_norm_rms_epsilon")
    file.key(attention__layer_norm_epsilon=epsilon, logit_scale=0.25, rope__scaling__type="none")
    for layer in range(LAYERS):
        mlp(file, layer, MLP)
        norms(file, layer, {"attn_norm": "input_layernorm"})
    return file


def make_phi3() -> GgufFile:
    """Three quarters of each head turn."""
    file = start("phi3", tied=False)
    file.key(attention__sliding_window=8, rope__dimension_count=HEAD // 4 * 3)
    for layer in range(LAYERS):
        stored, expected = f"blk.{layer}.", f"model.layers.{layer}."
        rows = (HEADS + 2 * KV_HEADS) * HEAD
        file.add(f"{stored}attn_qkv.weight", f"{expected}self_attn.qkv_proj.weight", rows, HIDDEN)
        file.add(f"{stored}attn_output.weight", f"{expected}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        file.add(f"{stored}ffn_up.weight", f"{expected}mlp.gate_up_proj.weight", 2 * FFN, HIDDEN)
        file.add(f"{stored}ffn_down.weight", f"{expected}mlp.down_proj.weight", HIDDEN, FFN)
        norms(file, layer, LLAMA_NORMS)
    return file


def make_phi3_long() -> GgufFile:
    """With the divisors of LongRoPE."""
    file = make_phi3()
    file.key(rope__scaling__attn_factor=1.25, rope__scaling__original_context_length=64)
    pairs = file.metadata["phi3.rope.dimension_count"] // 2
    file.stored["rope_factors_long.weight"] = np.linspace(1, 4, pairs, dtype=np.float32)
    file.stored["rope_factors_short.weight"] = np.linspace(1, 2, pairs, dtype=np.float32)
    return file


LFM2_MLP = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}


def _lfm2(architecture: str) -> GgufFile:
    file = start(architecture)
    file.key(attention__head_count_kv=[0, KV_HEADS], shortconv__l_cache=3)
    file.add("token_embd_norm.weight", "model.embedding_norm.weight", HIDDEN)
    file.add("blk.0.shortconv.in_proj.weight", "model.layers.0.conv.in_proj.weight", 3 * HIDDEN, HIDDEN)
    file.add("blk.0.shortconv.out_proj.weight", "model.layers.0.conv.out_proj.weight", HIDDEN, HIDDEN)
    file.add("blk.0.shortconv.conv.weight", "model.layers.0.conv.conv.weight", HIDDEN, 1, 3, change=np.squeeze)
    attention(file, 1)
    norms(file, 1, {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"})
    for layer in range(LAYERS):
        norms(file, layer, {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"})
    return file


def make_lfm2() -> GgufFile:
    file = _lfm2("lfm2")
    for layer in range(LAYERS):
        mlp(file, layer, LFM2_MLP)
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
    mlp(file, 0, LFM2_MLP)
    file.add("blk.1.ffn_gate_inp.weight", "model.layers.1.feed_forward.gate.weight", EXPERTS, HIDDEN)
    file.add("blk.1.exp_probs_b.bias", "model.layers.1.feed_forward.expert_bias", EXPERTS)
    split_experts(
        file,
        1,
        {part: f"feed_forward.experts.{{}}.{name}" for part, name in NUMBERED},
    )
    return file


def make_gpt_oss() -> GgufFile:
    """Experts appear in the float form; tests of the packed form quantise the stored tensors."""
    file = start("gpt-oss", tied=False)
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
        attention(file, layer, bias=True)
        file.add(f"blk.{layer}.attn_sinks.weight", f"model.layers.{layer}.self_attn.sinks", HEADS)
        own = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        norms(file, layer, own)
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
    "mixtral": make_mixtral,
    "olmo2": make_olmo2,
    "olmo3": make_olmo3,
    "smollm3": make_smollm3,
    "exaone4": make_exaone4,
    "granite": make_granite,
    "granitemoe": make_granitemoe,
    "qwen2moe": make_qwen2moe,
    "chatglm": make_chatglm,
    "glm4": make_glm4,
    "glm4moe": make_glm4moe,
    "qwen2": make_qwen2,
    "qwen3": make_qwen3,
    "qwen3moe": make_qwen3moe,
    "gemma2": make_gemma2,
    "gemma3": make_gemma3,
    "command-r": make_command_r,
    "cohere2": make_cohere2,
    "phi3": make_phi3,
    "lfm2": make_lfm2,
    "lfm2moe": make_lfm2moe,
    "gpt-oss": make_gpt_oss,
}
