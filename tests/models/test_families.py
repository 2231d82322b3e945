from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resin.models.families import find_model_class, read_config
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


@pytest.mark.parametrize("setting", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"sliding_window": 128}])
def test_what_llama_does_not_compute_is_refused(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LlamaConfig.from_hf({**TINY_CONFIGS["llama"], **setting})
    assert caught.value.field in setting
