"""Every setting of every family with every wrong value: it loads, or one clear sentence says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from resin.models.declare import Placement
from resin.models.families import FAMILIES, read_config
from resin.models.testing import TINY_CONFIGS
from resin.models.weights import AbstractModel
from resin.plan import InvalidRequest

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 2**31, 2**63, 10**400),
    *(0.0, 0.5, 1.0, -1.5, 1e30, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "4", "silu", "default", "full_attention", "no such thing"),
    *([], [1], [-1], [None], ["full_attention"], [[1]], {}, {"rope_type": []}, {"rope_type": "yarn"}, {"a": {"b": 1}}),
)
# Settings that published files have and the tiny configs leave out.
ABSENT = (
    *("attention_bias", "mlp_bias", "hidden_act", "hidden_activation", "head_dim", "rope_parameters", "rope_scaling"),
    *("rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "final_logit_softcapping", "is_causal"),
    *("attn_logit_softcapping", "tie_embedding", "full_attn_idxs", "block_ff_dim", "quantization_config"),
    *("swiglu_limit", "swiglu_alpha", "num_local_experts", "num_experts", "eos_token_id", "norm_eps", "rms_norm_eps"),
    *("compression_config", "quantization", "use_bidirectional_attention", "pruned_heads", "is_encoder_decoder"),
)
# Settings of other models, and of transformers, that change what is computed.
FOREIGN: Mapping[str, Any] = {
    "attention_multiplier": 0.2,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "clip_qkv": 8.0,
    "embedding_multiplier": 12.0,
    "first_k_dense_replace": 1,
    "is_causal": False,
    "layer_norm_eps": 1e-5,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "n_group": 8,
    "n_shared_experts": 1,
    "no_rope_layers": [1, 1, 1, 0],
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"0": {"num_attention_heads": 2}},
    "position_embedding_type": "alibi",
    "residual_multiplier": 0.22,
    "rope_interleaved": True,
    "scoring_func": "sigmoid",
    "shared_expert_intermediate_size": 512,
    "use_parallel_residual": True,
    "use_qk_norm": False,
}


def paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Every setting, those within settings too."""
    for name, value in config.items():
        yield (name,)
        if isinstance(value, Mapping):
            yield from ((name, inner) for inner in value)


def edited(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {**config, path[0]: value}
    return {**config, path[0]: {**config[path[0]], path[1]: value}}


def check_refusal(error: InvalidRequest, path: tuple[str, ...], value: Any) -> None:
    """One sentence: the setting, its value, what is allowed; it names the one that was edited."""
    text = str(error)
    assert re.match(r"[\w. ]+=.+: expected .+", text, re.DOTALL), text
    assert len(text) < 700, text
    # A factor that fell below the other is told by the other.
    assert path[-1] in text or "freq_factor" in text, text
    if error.field.endswith(path[-1]) and value is not None:
        assert repr(value)[:70] in text, text


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_every_edit_loads_or_is_refused_by_name(family: str) -> None:
    config = TINY_CONFIGS[family]
    known = {(name,) for name in (*ABSENT, "model_type")}
    loaded: dict[Any, dict[str, Any]] = {}
    for path in sorted({*paths(config), *known}):
        for value in VALUES:
            changed = edited(config, path, value)
            try:
                _, parsed = read_config(changed)
            except InvalidRequest as error:
                check_refusal(error, path, value)
            else:
                loaded.setdefault(repr(parsed), changed)
    assert len(loaded) > 20
    # What is read can be built, or one sentence says why not. Layers in thousands only take longer.
    quick = [one for one in loaded.values() if one["num_hidden_layers"] < 10]
    for changed in quick[:: max(len(quick) // 12, 1)]:
        model_class, parsed = read_config(changed)
        try:
            AbstractModel.of(model_class(parsed, Placement()))
            model_class.cache_groups(parsed, Placement())
        except InvalidRequest as error:
            assert ": expected " in str(error)


@pytest.mark.parametrize(
    ("family", "name"),
    [(family, name) for family in TINY_CONFIGS for name in FOREIGN if name not in TINY_CONFIGS[family]],
)
def test_what_changes_the_computation_is_refused(family: str, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_config({**TINY_CONFIGS[family], name: FOREIGN[name]})
    assert name in str(caught.value)


@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_what_changes_nothing_is_let_pass(family: str) -> None:
    harmless = {
        "architectures": ["SomethingForCausalLM"],
        "auto_map": {"AutoConfig": "there.Config"},
        "is_causal": True,
        "no_such_thing": None,
        "temperature": 0.6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "use_cache": True,
    }
    assert read_config({**TINY_CONFIGS[family], **harmless}) == read_config(TINY_CONFIGS[family])


def test_unknown_settings_are_few_in_a_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_config({**TINY_CONFIGS["llama"], **{f"odd_{index}": index for index in range(40)}})
    text = str(caught.value)
    assert text.startswith("odd_0=0: expected absent: LlamaConfig knows no such setting")
    assert text.count("odd_") == 9 and "31 more" in text


@pytest.mark.parametrize("model_type", [None, 1, ["llama"], {"llama": 1}, "", "LLAMA"])
def test_a_model_type_is_a_known_word(model_type: Any) -> None:
    with pytest.raises(InvalidRequest, match="model_type="):
        read_config({**TINY_CONFIGS["llama"], "model_type": model_type})


def test_every_family_of_the_table_has_a_class() -> None:
    for model_type in FAMILIES:
        relative = {"ministral": "mistral"}.get(model_type, model_type)
        assert read_config({**TINY_CONFIGS[relative], "model_type": model_type})


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        *(
            ({"quantization_config": {"quant_method": method, "bits": 4}}, "quantization_config.quant_method")
            for method in ("aqlm", "exl2", "hqq", "modelopt", "mxfp4", "quark", "torchao")
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quantization_config.quant_method"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
        *(
            ({"quantization_config": {"quant_method": "fp8", name: value}}, f"quantization_config.{name}")
            for name, value in (
                ("activation_scheme", "odd"),
                ("fmt", "e5m2"),
                ("weight_block_size", [128]),
                ("weight_block_size", [128, "128"]),
                ("weight_block_size", [0, 128]),
                ("bits", 8),
            )
        ),
    ],
)
def test_packed_weights_are_refused_by_the_name_of_their_method(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_config({**TINY_CONFIGS["llama"], **settings})
    assert caught.value.field == field
    method = settings.get("quantization_config", {})
    if isinstance(method, dict) and method.get("quant_method") not in (None, "fp8"):
        assert f"quant_method={method['quant_method']!r}" in str(caught.value)


def test_fp8_with_blocks_loads_everywhere_and_mxfp4_where_it_is_computed() -> None:
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for config in TINY_CONFIGS.values():
        read_config({**config, "quantization_config": {**block, "modules_to_not_convert": ["lm_head"]}})
    read_config({**TINY_CONFIGS["gpt_oss"], "quantization_config": {"quant_method": "mxfp4"}})
