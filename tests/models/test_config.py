from __future__ import annotations

import pytest

from resin.models.config import DecoderConfig
from resin.models.families import find_model_class, read_config
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


FULL_LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("settings", "full", "sliding"),
    [
        # Frequency 3 of 16, as Gemma3RotaryEmbedding of transformers 5.24 makes it.
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            0.0093736770,
            0.177827939,
        ),
        ({"rope_parameters": {"full_attention": FULL_LINEAR, "sliding_attention": PLAIN}}, 0.0093736770, 0.177827939),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {**PLAIN, "rope_theta": 5e3},
                },
                "rope_theta": 2e6,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            0.0329250842,
            0.202508435,
        ),
        ({}, 0.0749894157, 0.177827939),
    ],
)
def test_both_rotations_of_gemma_are_read_as_transformers_reads_them(
    settings: dict[str, object], full: float, sliding: float
) -> None:
    plain = {"rope_theta": None, "rope_local_base_freq": None}
    config = Gemma3Config.from_hf({**TINY_CONFIGS["gemma3_text"], **plain, **settings})
    found = (config.rope.frequencies[3], config.sliding_rope.frequencies[3])
    assert found == pytest.approx((full, sliding), rel=1e-6)


@pytest.mark.parametrize("rope", [FULL_LINEAR, {"full_attention": FULL_LINEAR, "main": PLAIN}])
def test_rotations_under_other_labels_are_refused(rope: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="rope_parameters"):
        Gemma3Config.from_hf({**TINY_CONFIGS["gemma3_text"], "rope_parameters": rope})


@pytest.mark.parametrize("family", ["llama", "qwen3", "lfm2", "gpt_oss"])
def test_labels_are_refused_where_there_is_one_rotation(family: str) -> None:
    nested = {"full_attention": FULL_LINEAR, "sliding_attention": PLAIN}
    with pytest.raises(InvalidRequest, match=r"rope_parameters\.full_attention="):
        find_model_class(TINY_CONFIGS[family]).Config.from_hf(
            {**TINY_CONFIGS[family], "rope_scaling": None, "rope_parameters": nested}
        )


def test_gpt_oss_without_a_rotation_has_the_published_one() -> None:
    absent = {"rope_scaling": None, "rope_theta": None}
    rope = find_model_class(TINY_CONFIGS["gpt_oss"]).Config.from_hf({**TINY_CONFIGS["gpt_oss"], **absent}).rope
    # As GptOssRotaryEmbedding of transformers 5.24 makes it of an empty config.
    assert rope.frequencies[3] == pytest.approx(0.00679495931, rel=1e-6)
    assert rope.factor == pytest.approx(1.34657359, rel=1e-6)


def test_lfm2_takes_its_own_spellings_first() -> None:
    config = {**TINY_CONFIGS["lfm2"], "tie_word_embeddings": True, "tie_embedding": False}
    assert not Lfm2Config.from_hf(config).tied
    wide = {**config, "block_ff_dim": 192, "intermediate_size": 96, "block_auto_adjust_ff_dim": False}
    assert Lfm2Config.from_hf(wide).ffn == 192
    with pytest.raises(InvalidRequest, match="rms_norm_eps"):
        read_config({**config, "rms_norm_eps": 1e-6})
