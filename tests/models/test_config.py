from __future__ import annotations

import pytest

from resin.models.config import DecoderConfig
from resin.models.families import find_model_class
from resin.models.gemma3 import Gemma3Config
from resin.models.lfm2 import Lfm2Config
from resin.models.rope import Rope
from resin.models.testing import TINY_CONFIGS
from resin.plan import InvalidRequest

GIVEN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": None,
    "num_key_value_heads": None,
}
DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 64}


def test_null_is_absent_and_defaults_stand_in() -> None:
    config = DecoderConfig.read(GIVEN, DEFAULTS)
    assert (config.kv_heads, config.head_dim, config.norm_eps, config.tied) == (4, 8, 1e-5, True)
    assert (config.max_context_tokens, config.eos_token_ids) == (64, ())


def test_the_config_wins_over_defaults_and_a_models_own_reading_over_both() -> None:
    assert not DecoderConfig.read({**GIVEN, "tie_word_embeddings": False}, DEFAULTS).tied
    rope = Rope.from_parameters({"rope_theta": 5.0, "original_max_position_embeddings": 64}, 8)
    config = DecoderConfig.read(GIVEN, DEFAULTS, rope=rope, kv_heads=1)
    assert config.rope == rope and config.kv_heads == 1


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("family", TINY_CONFIGS)
def test_what_is_missing_is_named(family: str, field: str) -> None:
    given = {**TINY_CONFIGS[family], field: None}
    with pytest.raises(InvalidRequest) as caught:
        find_model_class(given).Config.from_hf(given)
    assert caught.value.field == field


def test_each_family_means_its_own_by_an_absent_setting() -> None:
    absent = {"max_position_embeddings": None, "tie_word_embeddings": None, "rope_theta": None}
    lfm2 = Lfm2Config.from_hf({**TINY_CONFIGS["lfm2"], **absent})
    assert (lfm2.max_context_tokens, lfm2.tied, lfm2.norm_eps) == (128_000, True, 1e-5)
    gemma = Gemma3Config.from_hf({**TINY_CONFIGS["gemma3_text"], **absent, "head_dim": None})
    assert (gemma.max_context_tokens, gemma.tied, gemma.head_dim) == (131_072, True, 256)
