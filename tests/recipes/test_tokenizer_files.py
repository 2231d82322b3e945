"""What the files of a Hugging Face directory say about a tokenizer, wherever they say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from resin.models.loading import CheckpointError
from resin.recipes.tokenizer import load_tokenizer
from tests.recipes.tiny_tokenizers import byte_level, sentencepiece, write_files

TURNS = ["<|turn|>", "<|end|>"]


def test_what_training_left_in_the_file_is_switched_off(tmp_path: Path) -> None:
    tokenizer = sentencepiece("first", ["<s>"])
    plain = tokenizer.encode("hello world " * 9).ids
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=100, pad_id=1, pad_token="<s>")
    content = json.loads(tokenizer.to_str())
    content["model"]["dropout"] = 0.9
    loaded = load_tokenizer(write_files(tmp_path, content))
    for _ in range(5):
        assert loaded.encode("hello world " * 9, add_special=True) == loaded.encode_parts(["hello world " * 9]) == plain


def declared(*tokens: str, first: int = 256, **flags: bool) -> dict[str, Any]:
    return {str(first + index): {"content": token, **flags} for index, token in enumerate(tokens)}


@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_only_the_settings_declare(tmp_path: Path, special: bool) -> None:
    flags = {"special": special, "normalized": False, "lstrip": False, "rstrip": True, "single_word": False}
    settings = {"added_tokens_decoder": declared(*TURNS, **flags), "eos_token": TURNS[1]}
    tokenizer = load_tokenizer(write_files(tmp_path, byte_level([]), tokenizer_config=settings))
    assert tokenizer.encode("a<|turn|> b<|end|>") == [64, 256, 65, 257]  # rstrip takes the space
    assert tokenizer.special_ids == (frozenset({256, 257}) if special else frozenset())
    assert set(tokenizer.controls) == set(TURNS)
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((257,), 258)


def test_flags_in_the_settings_win(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": declared(*TURNS, special=False, normalized=False)}
    tokenizer = load_tokenizer(write_files(tmp_path, byte_level(TURNS), tokenizer_config=settings))
    assert tokenizer.special_ids == frozenset()
    assert tokenizer.encode("<|turn|>") == [256]


def test_tokens_that_only_older_files_declare(tmp_path: Path) -> None:
    written = {"added_tokens": {"<|turn|>": 256, "<|end|>": 257}}
    mapping = {"eos_token": {"content": "<|end|>", "lstrip": False}, "additional_special_tokens": ["<|turn|>"]}
    loaded = load_tokenizer(write_files(tmp_path, byte_level([]), **written, special_tokens_map=mapping))
    assert loaded.encode("<|turn|>a<|end|>") == [256, 64, 257]
    assert loaded.eos_ids == (257,)
    assert loaded.named_tokens == {"eos_token": "<|end|>"}


def test_named_pieces_of_the_vocabulary_become_control_tokens(tmp_path: Path) -> None:
    content = json.loads(sentencepiece("first", ["<s>", "</s>"]).to_str())
    content["added_tokens"] = []
    mapping = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "[PAD]"}
    loaded = load_tokenizer(write_files(tmp_path, content, special_tokens_map=mapping))
    assert loaded.encode("<s>Hi</s>") == [1, *loaded.encode_parts([1, "Hi"])[1:], 2]
    assert (loaded.bos_id, loaded.eos_ids, loaded.special_ids) == (1, (2,), frozenset({1, 2}))
    # A name without a piece has no row in the model, so no text may become it.
    assert loaded.token_to_id("[PAD]") is None and loaded.named_tokens["pad_token"] == "[PAD]"


def test_newer_settings_win_over_the_older_file(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {}, "eos_token": "<|turn|>"}
    files = write_files(
        tmp_path, byte_level(TURNS), tokenizer_config=settings, special_tokens_map={"eos_token": "<|end|>"}
    )
    assert load_tokenizer(files).named_tokens == {"eos_token": "<|turn|>"}


def test_a_token_for_an_id_that_cannot_be_is_refused(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": declared("<|turn|>", first=300)}
    with pytest.raises(CheckpointError, match=r"no place for the added token '<\|turn\|>' at 300: 256 is next"):
        load_tokenizer(write_files(tmp_path, byte_level([]), tokenizer_config=settings))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": [1]}},
        {"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"256": "a"}}},
        {"added_tokens": {"a": "256"}},
        {"tokenizer_config": {"chat_template": 3}},
        {"tokenizer_config": {"chat_template": [{"name": "tool_use", "template": "x"}]}},
    ],
)
def test_malformed_settings_are_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        load_tokenizer(write_files(tmp_path, byte_level([]), **files))


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (True, True), (False, False), (None, True)])
def test_what_the_settings_put_around_a_text(tmp_path: Path, add_bos: bool | None, add_eos: bool) -> None:
    settings = {"bos_token": TURNS[0], "eos_token": TURNS[1], "add_bos_token": add_bos, "add_eos_token": add_eos}
    loaded = load_tokenizer(write_files(tmp_path, byte_level(TURNS), tokenizer_config=settings))
    assert loaded.encode("a", add_special=True) == [*([256] if add_bos else []), 64, *([257] if add_eos else [])]
    assert loaded.encode("a") == [64]


def test_the_end_of_turn_in_templates_is_the_tokenizers_own(tmp_path: Path) -> None:
    files = write_files(
        tmp_path,
        byte_level(TURNS),
        tokenizer_config={"eos_token": TURNS[1], "image_token": "<image>", "extra_special_tokens": {"a_token": "<a>"}},
        generation_config={"eos_token_id": [256, 257]},
    )
    loaded = load_tokenizer(files)
    assert loaded.eos_ids == (256, 257)
    assert loaded.named_tokens == {"eos_token": TURNS[1], "image_token": "<image>", "a_token": "<a>"}


def test_templates_with_a_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    files = write_files(tmp_path, byte_level([]), tokenizer_config={"chat_template": named})
    loaded = load_tokenizer(files)
    assert (loaded.chat_template, loaded.tool_template) == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("J")
    loaded = load_tokenizer(files)
    assert (loaded.chat_template, loaded.tool_template) == ("J", None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("K")
    assert load_tokenizer(files).tool_template == "K"


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings = {"chat_template": named, "eos_token": TURNS[1], "bos_token": TURNS[0], "pad_token": "<pad>"}
    first = load_tokenizer(
        write_files(
            tmp_path, byte_level(TURNS), tokenizer_config=settings, generation_config={"eos_token_id": [256, 257]}
        )
    )
    (tmp_path / "again").mkdir()
    first.save(tmp_path / "again")
    second = load_tokenizer(tmp_path / "again")
    for name in ("chat_template", "tool_template", "named_tokens", "bos_id", "eos_ids", "special_ids", "controls"):
        assert getattr(first, name) == getattr(second, name), name
