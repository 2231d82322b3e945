from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from resin.models.declare import Placement
from resin.models.families import find_model_class, read_config
from resin.models.gemma2 import Gemma2Config
from resin.models.llama import Llama, LlamaConfig
from resin.models.loading import CheckpointError
from resin.models.qwen3 import Qwen3, Qwen3Config
from resin.models.rope import Rope
from resin.models.testing import TINY_CONFIGS, MemoryCheckpoint, random_checkpoint
from resin.models.weights import AbstractModel, check_tensors
from resin.plan import InvalidRequest


def test_table_and_explicit_name_find_classes() -> None:
    assert find_model_class({"model_type": "llama"}) is Llama
    assert find_model_class({"model_type": "qwen3"}) is Qwen3
    assert find_model_class({"model_type": "llama"}, "resin.models.qwen3:Qwen3") is Qwen3


@pytest.mark.parametrize(
    ("model_type", "name", "field"),
    [
        ("no_such", None, "model_type"),
        ("llama", "resin.models.llama", "model"),
        ("llama", "resin.models.llama:Nothing", "model"),
        ("llama", "resin.models.nowhere:Llama", "model"),
    ],
)
def test_unknown_models_are_refused(model_type: str, name: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_model_class({"model_type": model_type}, name)
    assert caught.value.field == field


OWN_MODELS = """
from resin.models.llama import Llama, LlamaConfig

class Bare:
    pass

class NoConfig(Llama):
    Config = None

class NoGroups:
    Config = LlamaConfig

class Whole(Llama):
    pass

class Short:
    @classmethod
    def from_hf(cls, config):
        return cls()

class ShortConfig(Llama):
    Config = Short

def function():
    pass
"""


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("Bare", "Config and cache_groups and logits"),
        ("NoConfig", "from_hf"),
        ("NoGroups", "cache_groups and logits"),
        ("function", "Config"),
        ("ShortConfig", "vocab_size and max_context_tokens and eos_token_ids"),
    ],
)
def test_what_a_model_file_forgot_is_named(
    name: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forgetful.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forgetful", raising=False)
    config = {"model_type": "own"}
    with pytest.raises(InvalidRequest, match=lacks):
        read_config(config, f"forgetful:{name}")
    assert read_config(TINY_CONFIGS["llama"], "forgetful:Whole")[0].__name__ == "Whole"


def test_config_reads_both_generations_of_fields() -> None:
    config = LlamaConfig.from_hf({**TINY_CONFIGS["llama"], "eos_token_id": [2, 7]})
    assert (config.head_dim, config.kv_heads, config.eos_token_ids) == (16, 2, (2, 7))
    published = {**TINY_CONFIGS["qwen3"], "use_sliding_window": False, "sliding_window": 4096}
    assert Qwen3Config.from_hf(published).head_dim == 32


@pytest.mark.parametrize("setting", [{"mlp_bias": True}, {"hidden_act": "gelu"}, {"sliding_window": 128}])
def test_what_llama_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LlamaConfig.from_hf({**TINY_CONFIGS["llama"], **setting})
    assert caught.value.field in setting


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "settings", "layer_types", "window"),
    [
        ("llama", {}, (FULL, FULL), None),
        ("mistral", {}, (SLIDING, SLIDING), 11),
        ("mistral", {"sliding_window": None}, (FULL, FULL), None),
        ("mistral", {"sliding_window": 512}, (FULL, FULL), None),  # as long as the longest sequence
        ("mistral", {"model_type": "ministral", "layer_types": [FULL, SLIDING]}, (FULL, SLIDING), 11),
        ("mixtral", {}, (SLIDING, SLIDING), 9),
        ("mixtral", {"sliding_window": None}, (FULL, FULL), None),
        ("olmo3", {}, (SLIDING, SLIDING, SLIDING, FULL), 7),
        ("olmo3", {"sliding_window": None}, (FULL,) * 4, None),
        ("smollm3", {}, (FULL, SLIDING, FULL, FULL, SLIDING), 9),
        ("smollm3", {"use_sliding_window": False}, (FULL,) * 5, None),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, (FULL, SLIDING) * 2 + (FULL,), 9),
        ("exaone4", {}, (SLIDING, SLIDING, FULL, SLIDING), 6),
        ("exaone4", {"sliding_window": None}, (FULL,) * 4, None),
        ("exaone4", {"sliding_window_pattern": "LG", "layer_types": [FULL, SLIDING] * 2}, (FULL, SLIDING) * 2, 6),
        ("qwen2_moe", {}, (SLIDING, FULL, FULL), 9),
        ("qwen2_moe", {"max_window_layers": 3}, (SLIDING, FULL, SLIDING), 9),
        ("qwen2_moe", {"use_sliding_window": False}, (FULL,) * 3, None),
        ("qwen2", {}, (FULL, SLIDING, SLIDING), 7),
        ("qwen2", {"layer_types": [SLIDING, FULL, FULL]}, (SLIDING, FULL, FULL), 7),
        ("qwen2", {"use_sliding_window": False}, (FULL, FULL, FULL), None),
        ("qwen2", {"use_sliding_window": None}, (FULL, FULL, FULL), None),
        ("qwen2", {"max_window_layers": None}, (FULL, FULL, FULL), 7),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (FULL, SLIDING), 7),
        ("gemma2", {}, (SLIDING, FULL, SLIDING), 5),
        ("cohere", {}, (FULL, FULL), None),
        ("cohere2", {}, (SLIDING, SLIDING, FULL, SLIDING), 9),
        ("cohere2", {"sliding_window_pattern": None}, (SLIDING, SLIDING, SLIDING, FULL), 9),
        ("phi3", {}, (SLIDING, SLIDING), 9),
        ("phi3", {"sliding_window": None}, (FULL, FULL), None),
    ],
)
def test_windows_are_on_the_layers_that_the_family_gives_them(
    family: str, settings: dict[str, object], layer_types: tuple[str, ...], window: int | None
) -> None:
    _, config = read_config({**TINY_CONFIGS[family], **settings})
    assert (config.layer_types, config.window_tokens) == (layer_types, window)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_layers_with_a_window_that_no_setting_turns_on_are_refused(family: str) -> None:
    layers = TINY_CONFIGS[family]["num_hidden_layers"]
    off = {"sliding_window": None, "use_sliding_window": None, "max_window_layers": None}
    with pytest.raises(InvalidRequest, match=r"layer_types='sliding_attention'.*sliding_window"):
        read_config({**TINY_CONFIGS[family], **off, "layer_types": [SLIDING] * layers})


def test_an_absent_window_or_cap_is_the_familys_and_null_is_none() -> None:
    names = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    given = {name: value for name, value in TINY_CONFIGS["gemma2"].items() if name not in names}
    absent = Gemma2Config.from_hf(given)
    assert (absent.window_tokens, absent.attention_softcap, absent.logit_softcap) == (4096, 50.0, 30.0)
    null = Gemma2Config.from_hf({**given, **dict.fromkeys(names[1:])})
    assert (null.attention_softcap, null.logit_softcap) == (None, None)
    with pytest.raises(InvalidRequest, match="sliding_window"):
        Gemma2Config.from_hf({**given, "sliding_window": None})
    mistral = {name: value for name, value in TINY_CONFIGS["mistral"].items() if name != "sliding_window"}
    assert read_config({**mistral, "max_position_embeddings": 32_768})[1].window_tokens == 4096


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("qwen2", {"attention_bias": True}),  # whatever it says, queries, keys and values alone have one
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}),
        ("gemma2", {"attention_bias": True}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"hidden_act": "gelu"}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}),  # transformers reads it and leaves scores as they are
        ("mistral", {"hidden_act": "gelu"}),
        ("mixtral", {"attention_bias": True}),
        ("olmo2", {"clip_qkv": 8.0}),
        ("smollm3", {"no_rope_layers": [1, 0]}),
        ("exaone4", {"attention_bias": True}),
        ("exaone4", {"sliding_window_pattern": "LLG"}),  # without a list of layers
        ("granite", {"residual_multiplier": 0}),
        ("granitemoe", {"mlp_bias": True}),
        ("qwen2_moe", {"attention_bias": True}),
        ("glm4_moe", {"n_group": 8}),
        ("glm4_moe", {"topk_group": 4}),
        ("glm4_moe", {"n_shared_experts": 0}),
        ("cohere", {"hidden_act": "gelu"}),
        ("cohere", {"logit_scale": 0}),
        ("cohere2", {"use_qk_norm": True}),
        ("cohere2", {"use_parallel_block": False}),
        ("cohere2", {"position_embedding_type": "rope"}),
        ("cohere2", {"rotary_pct": 0.5}),
        ("cohere2", {"layer_switch": 4}),
        ("phi3", {"attention_bias": True}),
        ("phi3", {"lm_head_bias": True}),
        ("phi3", {"full_attn_mod": 2}),
        ("phi3", {"interpolate_factor": 4}),
    ],
)
def test_what_a_family_does_not_compute_is_refused(family: str, setting: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_config({**TINY_CONFIGS[family], **setting})
    assert caught.value.field in setting


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi_scales_positions_as_longrope_whatever_its_file_calls_it(kind: str) -> None:
    tiny = TINY_CONFIGS["phi3"]
    expected = read_config(tiny)[1].rope
    assert read_config({**tiny, "rope_scaling": {**tiny["rope_scaling"], "type": kind}})[1].rope == expected
    renamed = {**tiny, "rope_scaling": None, "rope_parameters": {**tiny["rope_scaling"], "rope_type": kind}}
    assert read_config(renamed)[1].rope == expected
    absent = {name: value for name, value in tiny.items() if name != "original_max_position_embeddings"}
    assert read_config(absent)[1].rope.long.above_tokens == 4096
    plain = read_config({**tiny, "rope_scaling": None})[1].rope
    assert plain.long is None and plain.factor == 1 and plain.lanes is not None


@pytest.mark.parametrize(
    ("family", "settings", "biases"),
    [
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen2", {}, {"q_proj", "k_proj", "v_proj"}),
        ("olmo2", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("olmo2", {"attention_bias": None}, set()),
        ("smollm3", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("granite", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen2_moe", {}, {"q_proj", "k_proj", "v_proj"}),
        ("qwen2_moe", {"qkv_bias": False}, set()),
        ("glm", {"attention_bias": None}, {"q_proj", "k_proj", "v_proj"}),
        ("glm4", {}, set()),
        ("glm4_moe", {"attention_bias": None}, set()),
        ("qwen3", {"attention_bias": True}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("cohere", {}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("cohere", {"attention_bias": False}, set()),
    ],
)
def test_biases_of_a_family(family: str, settings: dict[str, object], biases: set[str]) -> None:
    arrays = random_checkpoint({**TINY_CONFIGS[family], **settings}).arrays
    assert {name.split(".")[-2] for name in arrays if name.endswith(".bias")} == biases


@pytest.mark.parametrize(
    ("family", "settings", "turning"),
    [
        ("smollm3", {}, [True, False, True, True, False]),
        ("smollm3", {"no_rope_layers": None}, [True, True, True, False, True]),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 1}, [False] * 5),
        ("exaone4", {}, [True, True, False, True]),
        ("exaone4", {"sliding_window": 512}, [True, True, False, True]),  # as long as the longest sequence
        ("exaone4", {"sliding_window": None}, [True] * 4),
    ],
)
def test_layers_that_know_positions(family: str, settings: dict[str, object], turning: list[bool]) -> None:
    model_class, config = read_config({**TINY_CONFIGS[family], **settings})
    layers = model_class(config, Placement()).layers
    assert [any(layer.attention.rope.frequencies) for layer in layers] == turning


@pytest.mark.parametrize("window", [7, 512])
def test_olmo3_scales_the_rotation_of_layers_without_a_window(window: int) -> None:
    model_class, config = read_config({**TINY_CONFIGS["olmo3"], "sliding_window": window})
    factors = [layer.attention.rope.factor for layer in model_class(config, Placement()).layers]
    assert factors == [1, 1, 1, pytest.approx(1.2079441541679836)]


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_an_absent_end_of_text_is_glms(family: str) -> None:
    absent = {name: value for name, value in TINY_CONFIGS[family].items() if name != "eos_token_id"}
    assert read_config(absent)[1].eos_token_ids == (151_329, 151_336, 151_338)


def test_layers_that_guess_further_tokens_are_left_alone() -> None:
    checkpoint = random_checkpoint(TINY_CONFIGS["glm4_moe"])
    model_class, config = read_config(checkpoint.config)
    model = AbstractModel.of(model_class(config, Placement()))
    extra = np.ones((1, 1), np.float32)
    check_tensors(
        model, MemoryCheckpoint(checkpoint.config, {**checkpoint.arrays, "model.layers.3.eh_proj.weight": extra})
    )
    for name in ("model.layers.4.eh_proj.weight", "model.layers.30.eh_proj.weight"):
        with pytest.raises(CheckpointError, match=r"eh_proj"):
            check_tensors(model, MemoryCheckpoint(checkpoint.config, {**checkpoint.arrays, name: extra}))


def test_cohere_2_knows_positions_within_windows_alone() -> None:
    model_class, config = read_config(TINY_CONFIGS["cohere2"])
    still = [layer.attention.rope == Rope.still(config.head_dim) for layer in model_class(config, Placement()).layers]
    assert still == [kind == FULL for kind in config.layer_types]
    with pytest.raises(InvalidRequest, match="sliding_window"):
        read_config({**TINY_CONFIGS["cohere2"], "sliding_window": None})
