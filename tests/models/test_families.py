from __future__ import annotations

import pytest

from resin.models.families import find_model_class
from resin.models.llama import Llama, LlamaConfig
from resin.models.qwen3 import Qwen3, Qwen3Config
from resin.models.testing import TINY_CONFIGS
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


def test_config_reads_both_generations_of_fields() -> None:
    config = LlamaConfig.from_hf({**TINY_CONFIGS["llama"], "eos_token_id": [2, 7]})
    assert (config.head_dim, config.kv_heads, config.eos_token_ids) == (16, 2, (2, 7))
    published = {**TINY_CONFIGS["qwen3"], "use_sliding_window": False, "sliding_window": 4096}
    assert Qwen3Config.from_hf(published).head_dim == 32


@pytest.mark.parametrize("setting", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"sliding_window": 128}])
def test_what_llama_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LlamaConfig.from_hf({**TINY_CONFIGS["llama"], **setting})
    assert caught.value.field in setting
