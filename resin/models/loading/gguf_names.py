"""Which stored GGUF tensor, changed how, gives each Hugging Face tensor.

Every rule is a `Stored` (one tensor, or one expert of a stack, with an optional change of its rows or values) or one
of the two gpt-oss forms, which interleave the gate and up rows that GGUF keeps apart.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gguf.constants import GGMLQuantizationType

from resin.models.loading.checkpoint import CheckpointError
from resin.models.loading.gguf_header import GgufHeader


class Change(Enum):
    """What a stored tensor needs to become the Hugging Face one."""

    NONE = "none"
    UNPERMUTE_HEADS = "unpermute heads"  # rows of each head: interleaved rotary pairs -> halves
    MINUS_ONE = "minus one"  # Gemma norms are stored as 1 + w
    CONV_CHANNEL = "conv channel"  # [H, L] -> [H, 1, L]
    ONE_ROW = "one row"  # [H] or [1, H] -> [1, H]


@dataclass(frozen=True, slots=True)
class Stored:
    source: str
    change: Change = Change.NONE
    heads: int = 0  # for UNPERMUTE_HEADS
    expert: int | None = None  # index into the first dimension of a stack
    rows: slice | None = None  # of a matrix or a vector that holds several


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The `_blocks` (or `_scales`) of a Hugging Face MXFP4 tensor; two sources interleave by row (gate, up)."""

    sources: tuple[str, ...]
    part: str  # "blocks" or "scales"


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Experts as floats; two sources interleave by row; Hugging Face stores weights `[E, rows, in]` transposed."""

    sources: tuple[str, ...]
    transposed: bool


@dataclass(frozen=True, slots=True)
class JoinedStacks:
    """Stacks `[E, rows, in]` one below the other, expert by expert."""

    sources: tuple[str, ...]


Rule = Stored | PackedExperts | PlainExperts | JoinedStacks

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _MLP | {"ffn_norm": "post_attention_layernorm"}
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AFTER = {kind: name for kind, name in _ATTENTION.items() if kind != "attn_norm"} | _MLP | _NORMS_AFTER
_GEMMA = _ATTENTION | _MLP | _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_FUSED = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_PHI3 = _FUSED | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GLM4 = (
    _ATTENTION
    | _FUSED
    | {
        "ffn_norm": "post_attention_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    }
)


def _shared_experts(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}


_LFM2 = _ATTENTION | {
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate_inp": "feed_forward.gate",
}
_GPT_OSS = _ATTENTION | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
_LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mixtral": _LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "smollm3": _LLAMA,
    "exaone4": _AFTER,
    "granite": _LLAMA,
    "granitemoe": _LLAMA | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
    "qwen2": _LLAMA,
    "glm": _LLAMA | _FUSED,
    "glm4": _GLM4,
    "glm4_moe": _ATTENTION
    | _MLP
    | _shared_experts("shared_experts")
    | {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
    "qwen2_moe": _LLAMA
    | _shared_experts("shared_expert")
    | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA | {"ffn_gate_inp": "mlp.gate"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "cohere": _ATTENTION | _MLP,
    "cohere2": _ATTENTION | _MLP,
    "phi3": _PHI3,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "gpt_oss": _GPT_OSS,
}
_SELECTION_BIASES = {"lfm2_moe": "feed_forward.expert_bias", "glm4_moe": "mlp.gate.e_score_correction_bias"}
# Stacked experts that Hugging Face stores one by one: GGUF name -> name of one expert's matrix.
_NUMBERED = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
_LISTED = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_SPLIT_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "mixtral": {f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{hf_name}" for name, hf_name in _NUMBERED},
    "glm4_moe": _LISTED,
    "qwen2_moe": _LISTED,
    "qwen3_moe": _LISTED,
    "lfm2_moe": {f"ffn_{name}_exps": f"feed_forward.experts.{{}}.{hf_name}" for name, hf_name in _NUMBERED},
}
# Stacked experts that Hugging Face stores in one stack a matrix: its name, and those of the stacks that it is made of.
_JOINED_EXPERTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "granitemoe": {
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
        "block_sparse_moe.output_linear": ("ffn_down_exps",),
    }
}
# Families whose files store pairs of a rotation side by side.
_PERMUTED = {"llama", "mixtral", "smollm3", "granite", "granitemoe"}
# Families whose files store divisors of their frequencies, from which the llama3 scaling is found again.
FITTED_ROPE = {"llama", "smollm3", "exaone4"}
# Families whose files store 1 + w for the w of a norm.
_NORMS_PLUS_ONE = {"gemma2", "gemma3_text"}
# Tensors that hold no weights of the model itself: they are read into the config, or not at all.
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_LISTED_EXPERT = re.compile(r"(ffn_\w+)\.(\d+)")  # of files before stacks


def name_gguf_tensors(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Rule]:
    """Returns Hugging Face name -> rule for every tensor of a file.

    Raises:
        CheckpointError: a tensor that the architecture does not have.
    """
    rules: dict[str, Rule] = {}
    for name in header.tensors:
        if name in _NOT_WEIGHTS or _is_of_drafts(name, config):
            continue
        found = dict(_name_one(name, header, config))
        if not found and not _is_gpt_oss_expert(name, config):
            raise CheckpointError(header.location, f"is not known in a {config['model_type']} model", name)
        rules.update(found)
    if config["model_type"] == "gpt_oss":
        for layer in range(config["num_hidden_layers"]):
            rules.update(_gpt_oss_experts(layer, header))
    return rules


def _is_of_drafts(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is of the layers beyond the last, which guess further tokens."""
    match, layers = _LAYER_NAME.fullmatch(name), config["num_hidden_layers"]
    return match is not None and layers <= int(match[1]) < layers + config.get("num_nextn_predict_layers", 0)


def _name_one(name: str, header: GgufHeader, config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    model_type = config["model_type"]
    if model_type.startswith("lfm2") and name in ("token_embd_norm.weight", "output_norm.weight"):
        yield "model.embedding_norm.weight", Stored(name)
        return
    if name in _TOP_LEVEL:
        yield _TOP_LEVEL[name], _norm_rule(name, config) if name == "output_norm.weight" else Stored(name)
        return
    match = _LAYER_NAME.fullmatch(name)
    if match is None or int(match[1]) >= config["num_hidden_layers"]:
        return
    layer, kind, suffix = match.groups()
    prefix = f"model.layers.{layer}."
    if kind == "exp_probs_b" and model_type in _SELECTION_BIASES:
        yield prefix + _SELECTION_BIASES[model_type], Stored(name)
    elif kind == "attn_qkv" and model_type == "glm" and suffix is not None:
        yield from _parts_of_qkv(name, f"{prefix}self_attn.", suffix, config)
    elif kind == "attn_sinks" and model_type == "gpt_oss":
        yield prefix + "self_attn.sinks", Stored(name)
    elif kind in _SPLIT_EXPERTS.get(model_type, {}) and suffix == "weight":
        for expert in range(header.tensors[name].shape[0]):
            yield prefix + _SPLIT_EXPERTS[model_type][kind].format(expert) + ".weight", Stored(name, expert=expert)
    elif (listed := _LISTED_EXPERT.fullmatch(kind)) and f"{listed[1]}_exps" in _SPLIT_EXPERTS.get(model_type, {}):
        yield f"{prefix}{_SPLIT_EXPERTS[model_type][f'{listed[1]}_exps'].format(listed[2])}.weight", Stored(name)
    elif suffix == "weight" and (joined := _joined_stacks(kind, f"blk.{layer}", header, model_type)):
        yield f"{prefix}{joined[0]}.weight", JoinedStacks(joined[1])
    elif kind in _LAYER_NAMES[model_type] and suffix is not None:
        yield f"{prefix}{_LAYER_NAMES[model_type][kind]}.{suffix}", _layer_rule(name, kind, config)


def _parts_of_qkv(name: str, prefix: str, suffix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    start = 0
    for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
        stop = start + config[heads] * config["head_dim"]
        yield f"{prefix}{part}_proj.{suffix}", Stored(name, rows=slice(start, stop))
        start = stop


def _joined_stacks(kind: str, block: str, header: GgufHeader, model_type: str) -> tuple[str, tuple[str, ...]] | None:
    """The Hugging Face stack that a GGUF stack belongs to, and all of that stack's parts."""
    for target, kinds in _JOINED_EXPERTS.get(model_type, {}).items():
        if kind in kinds:
            sources = tuple(f"{block}.{part}.weight" for part in kinds)
            _refuse_unlike(header, sources)
            return target, sources
    return None


def _refuse_unlike(header: GgufHeader, sources: tuple[str, ...]) -> None:
    """Refuses parts of one tensor that are missing or differ in shape."""
    for source in sources:
        if source not in header.tensors:
            raise CheckpointError(header.location, "is missing", source)
        if header.tensors[source].shape != header.tensors[sources[0]].shape:
            raise CheckpointError(header.location, f"differs in shape from {sources[0]}", source)


def _layer_rule(name: str, kind: str, config: Mapping[str, Any]) -> Stored:
    if config["model_type"] in _PERMUTED and kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        return Stored(name, Change.UNPERMUTE_HEADS, heads=heads)
    if kind.endswith("norm"):
        return _norm_rule(name, config)
    if kind == "ffn_gate_inp_shexp":
        return Stored(name, Change.ONE_ROW)
    if kind == "shortconv.conv":
        return Stored(name, Change.CONV_CHANNEL)
    return Stored(name)


def _norm_rule(name: str, config: Mapping[str, Any]) -> Stored:
    return Stored(name, Change.MINUS_ONE if config["model_type"] in _NORMS_PLUS_ONE else Change.NONE)


def _is_gpt_oss_expert(name: str, config: Mapping[str, Any]) -> bool:
    if config["model_type"] != "gpt_oss":
        return False
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)", name)
    return match is not None and int(match[1]) < config["num_hidden_layers"]


def _gpt_oss_experts(layer: int, header: GgufHeader) -> Iterator[tuple[str, Rule]]:
    for hf_name, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        target = f"model.layers.{layer}.mlp.experts.{hf_name}"
        for suffix in ("weight", "bias"):
            sources = tuple(f"blk.{layer}.ffn_{kind}_exps.{suffix}" for kind in kinds)
            _refuse_unlike(header, sources)
            if suffix == "bias":
                yield f"{target}_bias", PlainExperts(sources, transposed=False)
            elif all(header.tensors[source].type == GGMLQuantizationType.MXFP4 for source in sources):
                yield f"{target}_blocks", PackedExperts(sources, "blocks")
                yield f"{target}_scales", PackedExperts(sources, "scales")
            else:
                yield target, PlainExperts(sources, transposed=True)
