"""Tokenizers of GGUF files as llama.cpp reads them: prefixes, bos, and how text is cut."""

from __future__ import annotations

from typing import Any

import pytest

from resin.models.loading import CheckpointError
from resin.recipes.pretokenizers import PRE_TOKENIZERS
from resin.recipes.tokenizer import ChatTokenizer
from resin.recipes.tokenizer_gguf import build_gguf_tokenizer
from tests.recipes.tiny_tokenizers import byte_level, sentencepiece

TEXTS = ["hello the world", " hello", "  hello", "Hi</s>hello<s> the", "", "</s>", "é\n Hi", "[INST] Hi [/INST]"]


def sentencepiece_metadata() -> dict[str, Any]:
    """The legacy kind as a GGUF file holds it: scores instead of merges, best first."""
    library = sentencepiece("legacy", ["<s>", "</s>"])
    tokens = [token for token, _ in sorted(library.get_vocab().items(), key=lambda item: item[1])]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def byte_level_metadata(**keys: Any) -> dict[str, Any]:
    library = byte_level(["<s>"])
    tokens = [token for token, _ in sorted(library.get_vocab().items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.ggml.merges": ["a b"] if "ab" in tokens else ["h e"],
        "tokenizer.ggml.bos_token_id": 256,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def test_a_space_prefix_stands_in_front_of_every_stretch_of_text() -> None:
    library = sentencepiece("legacy", ["<s>", "</s>"])
    tokenizer = ChatTokenizer(build_gguf_tokenizer(sentencepiece_metadata(), "toy"), bos_id=1, eos_ids=(2,))
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("Hi", add_special=True)[0] == 1
    assert tokenizer.decode(tokenizer.encode("hello the world")) == "hello the world"
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    plain = ChatTokenizer(build_gguf_tokenizer(metadata, "toy"))
    assert plain.id_to_token(plain.encode("hello")[0]) == "hello"
    assert tokenizer.id_to_token(tokenizer.encode("hello")[0]) == "▁hello"


def test_user_defined_pieces_beside_a_space_prefix() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|im_start|>"]
    metadata["tokenizer.ggml.token_type"] += [4]
    metadata["tokenizer.ggml.scores"] += [0.0]
    tokenizer = ChatTokenizer(build_gguf_tokenizer(metadata, "toy"))
    turn = tokenizer.controls["<|im_start|>"]
    assert tokenizer.encode("hello<|im_start|>hello") == [*tokenizer.encode("hello"), turn, *tokenizer.encode("hello")]
    assert turn not in tokenizer.encode_parts(["<|im_start|>"])


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@pytest.mark.parametrize("given", [None, True, False])
def test_who_starts_a_text_with_bos(pre: str, given: bool | None) -> None:
    """By llama.cpp's table where the file does not say: Llama 3 and its kin, LFM2 and Tekken do, others do not."""
    vocabulary = byte_level_metadata(pre=pre)
    vocabulary["tokenizer.ggml.tokens"].insert(256, "he")
    vocabulary["tokenizer.ggml.token_type"].insert(256, 1)
    vocabulary["tokenizer.ggml.bos_token_id"] = 257
    if given is not None:
        vocabulary["tokenizer.ggml.add_bos_token"] = given
    ids = build_gguf_tokenizer(vocabulary, "toy").encode("a", add_special_tokens=True).ids
    usual = pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken")
    assert (ids[0] == 257) is (usual if given is None else given)


def words(pre: str, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]


def test_how_each_kind_cuts_text() -> None:
    """Digits, case and contractions are where the kinds differ."""
    text = "HTTPServer's 12345"
    assert words("llama3", text) == words("falcon3", text) == ["HTTPServer", "'s", " ", "123", "45"]
    for pre in ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"):
        assert words(pre, text) == words("llama3", text)
    for pre in ("gpt-2", "olmo", "exaone4"):
        assert words(pre, text) == ["HTTPServer", "'s", " 12345"]
    for pre in ("refact", "smollm"):
        assert words(pre, text) == ["HTTPServer", "'s", " ", *"12345"]
    assert words("deepseek-r1-qwen", text) == ["HTTPServer", "'s", " ", *"12345"]
    assert words("gpt-4o", text) == ["HTTPServer's", " ", "123", "45"]
    assert words("tekken", text) == ["HTTPServer", "'s", " ", *"12345"]
    assert words("tekken", "camelCase/x\n") == ["camel", "Case", "/x", "\n"]
    assert words("deepseek-v3", text + "日本x") == ["HTTPServer", "'s", " ", "123", "45", "日本", "x"]


def test_a_missing_or_unknown_kind_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.ggml\.pre"):
        build_gguf_tokenizer(byte_level_metadata(), "toy")
    with pytest.raises(CheckpointError, match="'default' is not supported"):
        build_gguf_tokenizer(byte_level_metadata(pre="default"), "toy")
