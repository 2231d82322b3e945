"""Published sizes: what each checkpoint declares and caches, without a single number of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from resin.models.declare import Placement
from resin.models.families import find_model_class
from resin.models.lfm2 import Lfm2Config
from resin.models.summary import count_parameters
from resin.models.weights import AbstractModel
from resin.plan import StateGroup, WindowGroup
from resin.plan.cache import entry_bytes

LFM2_LAYERS = ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)]
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "layer_types": LFM2_LAYERS,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "vocab_size": 65536,
    "max_position_embeddings": 128_000,
    "eos_token_id": 7,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "LFM2-350M": {**LFM2, "hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656},
    "LFM2-700M": {**LFM2, "hidden_size": 1536, "num_attention_heads": 24, "block_ff_dim": 10240},
    "LFM2-1.2B": {**LFM2, "hidden_size": 2048, "num_attention_heads": 32, "block_ff_dim": 12288},
    "LFM2-2.6B": {
        **LFM2,
        "num_hidden_layers": 30,
        "layer_types": ["full_attention" if index in (2, 5, 9, 13, 17, 21, 24, 27) else "conv" for index in range(30)],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "block_ff_dim": 10752,
        "block_auto_adjust_ff_dim": False,
    },
    "LFM2-8B-A1B": {
        **LFM2,
        "model_type": "lfm2_moe",
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    },
    "Gemma-3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "_sliding_window_pattern": 6,
        "vocab_size": 262_144,
        "rope_local_base_freq": 10_000.0,
        "max_position_embeddings": 32_768,
    },
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}


def parts(name: str) -> tuple[AbstractModel, tuple[Any, ...]]:
    config, placement = CONFIGS[name], Placement("bfloat16")
    model_class = find_model_class(config)
    parsed = model_class.Config.from_hf(config)
    return AbstractModel.of(model_class(parsed, placement)), model_class.cache_groups(parsed, placement)


def parameters(model: AbstractModel) -> int:
    """Numbers in the model, packed ones counted as what they decode to."""
    return sum(count_parameters(item) for item in model.declarations)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("LFM2-350M", 0.354),
        ("LFM2-700M", 0.742),
        ("LFM2-1.2B", 1.170),
        ("LFM2-2.6B", 2.569),
        ("LFM2-8B-A1B", 8.34),
        ("Qwen3-30B-A3B", 30.5),
        ("Gemma-3-270m", 0.268),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
    ],
)
def test_parameters(name: str, billions: float) -> None:
    assert parameters(parts(name)[0]) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "history_per_token", "window", "state"),
    [
        ("LFM2-350M", 12_288, 0, 40_960),
        ("LFM2-1.2B", 12_288, 0, 81_920),
        ("LFM2-2.6B", 16_384, 0, 180_224),
        ("LFM2-8B-A1B", 12_288, 0, 147_456),
        ("Qwen3-30B-A3B", 98_304, 0, 0),
        ("Gemma-3-270m", 3_072, 15 * 512 * 1024, 0),
        ("gpt-oss-20b", 24_576, 12 * 128 * 2048, 0),
        ("gpt-oss-120b", 36_864, 18 * 128 * 2048, 0),
    ],
)
def test_cache_bytes_in_bfloat16(name: str, history_per_token: int, window: int, state: int) -> None:
    sizes = {"history": 0, "window": 0, "state": 0}
    for group in parts(name)[1]:
        size = entry_bytes(group, "bfloat16")
        if isinstance(group, StateGroup):
            sizes["state"] += size
        elif isinstance(group, WindowGroup):
            sizes["window"] += size * group.window_tokens
        else:
            sizes["history"] += size
    assert sizes == {"history": history_per_token, "window": window, "state": state}


def test_packed_experts_stay_packed() -> None:
    model, _ = parts("gpt-oss-20b")
    # 4.25 bits a value for 19.1e9 expert values, bfloat16 for the rest.
    assert model.nbytes / 1e9 == pytest.approx(13.8, rel=0.01)


def test_active_share_of_a_mixture() -> None:
    assert parts("LFM2-8B-A1B")[0].flops_per_token / 2e9 == pytest.approx(1.5, rel=0.05)
    assert parts("Qwen3-30B-A3B")[0].flops_per_token / 2e9 == pytest.approx(3.04, rel=0.05)


@pytest.mark.parametrize(("given", "width"), [(6656, 4608), (10240, 6912), (12288, 8192)])
def test_lfm2_adjusts_its_width(given: int, width: int) -> None:
    config = CONFIGS["LFM2-350M"]
    assert Lfm2Config.from_hf({**config, "block_ff_dim": given}).ffn == width
    plain = {**config, "block_ff_dim": None, "intermediate_size": given, "block_auto_adjust_ff_dim": False}
    assert Lfm2Config.from_hf(plain).ffn == given


def test_old_spellings_give_the_same_config() -> None:
    config = dict(CONFIGS["LFM2-350M"])
    indices = [index for index, kind in enumerate(config.pop("layer_types")) if kind == "full_attention"]
    old = {**config, "full_attn_idxs": indices, "tie_embedding": True}
    assert Lfm2Config.from_hf(old) == Lfm2Config.from_hf(CONFIGS["LFM2-350M"])
