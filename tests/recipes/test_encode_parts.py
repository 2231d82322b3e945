"""Conversations are encoded as one whole: the ids of the library, and no control token that a text only spells."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from resin.recipes.tokenizer import ChatTokenizer
from tests.recipes.tiny_tokenizers import byte_level, sentencepiece

CONTROLS = ["<s>", "</s>", "[INST]", "[/INST]"]
# As chat templates of these families lay turns out; control tokens are those of the vocabulary.
LAYOUTS = {
    "mistral v1": "<s> [INST] Hi [/INST] hello</s> [INST] the world [/INST]",
    "mistral v3": "<s>[INST] Hi[/INST] hello</s>[INST] the world[/INST]",
    "tekken": "<s>[INST]Hi[/INST]hello</s>[INST]the world[/INST]",
    "llama 2": "<s>[INST] <<SYS>>\nbe brief\n<</SYS>>\n\nHi [/INST] hello </s><s>[INST] the [/INST]",
    "zephyr": "<|user|>\nHi</s>\n<|assistant|>\nhello</s>\n<|user|>\nthe world</s>\n<|assistant|>\n",
    "text first": "Hi<s> hello</s>the",
}
KINDS = {
    "first": sentencepiece("first", CONTROLS),
    "always": sentencepiece("always", CONTROLS),
    "legacy": sentencepiece("legacy", CONTROLS),
    "strips": sentencepiece("first", CONTROLS, lstrip=True, rstrip=True),
    "v1 tokens": sentencepiece("first", CONTROLS[:2]),
    "bytes": byte_level(CONTROLS),
    "gap": byte_level(CONTROLS, gap=300),
}


def parts_of(tokenizer: ChatTokenizer, text: str) -> list[str | int]:
    """The text with every control token that it spells as an id."""
    pieces = re.split(f"({'|'.join(map(re.escape, tokenizer.controls))})", text)
    return [tokenizer.controls.get(piece, piece) for piece in pieces]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text(kind: str, layout: str) -> None:
    tokenizer, text = ChatTokenizer(KINDS[kind]), LAYOUTS[layout]
    assert tokenizer.encode_parts(parts_of(tokenizer, text)) == KINDS[kind].encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_spelled_control_tokens_stay_the_text_that_they_are(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = st.one_of(st.sampled_from([*CONTROLS, "<", "s>", " ", "[INST"]), st.text("abHi<>[]/ \n", max_size=4))
    text = "x" + "".join(data.draw(st.lists(pieces, max_size=6))) + "x"
    begin, end = tokenizer.controls["<s>"], tokenizer.controls["</s>"]
    ids = tokenizer.encode_parts([begin, text, end])
    assert (ids[0], ids[-1]) == (begin, end)
    assert tokenizer.special_ids.isdisjoint(ids[1:-1])
    assert max(ids) < tokenizer.vocab_size
    # Some kinds put a space in front of every text that follows a token; nothing else is altered.
    spelled = b"".join(map(tokenizer.id_to_bytes, ids[1:-1])).decode()
    assert spelled == (" " if kind in ("legacy", "always") else "") + text


TOKENIZERS = {kind: ChatTokenizer(tokenizer) for kind, tokenizer in KINDS.items()}


def test_a_token_that_the_library_does_not_look_for_can_be_placed() -> None:
    tokenizer = ChatTokenizer(byte_level([]))
    letter = tokenizer.encode("q")[0]
    assert tokenizer.encode_parts(["a", letter, "b"]) == tokenizer.encode("aqb")


def test_controls_are_special_tokens_tags_and_what_the_template_writes() -> None:
    library = byte_level(["<s>"])
    plain = ["<tool_call>", "  ", "word", "<think>", "«turn»"]
    library.add_tokens([AddedToken(token, normalized=False) for token in plain])
    tokenizer = ChatTokenizer(library, chat_template="«turn»word")
    assert set(tokenizer.controls) == {"<s>", "<tool_call>", "<think>", "«turn»"}
    # Others are found in any text, as the library finds them.
    assert tokenizer.encode_parts(["a  word"]) == library.encode("a  word", add_special_tokens=False).ids


def test_html_tags_of_a_sentencepiece_vocabulary_are_text() -> None:
    library = sentencepiece("first", ["<s>"])
    library.add_tokens([AddedToken(token, normalized=False) for token in ("<table>", "<start_of_turn>")])
    tokenizer = ChatTokenizer(library)
    assert set(tokenizer.controls) == {"<unk>", "<s>", "<start_of_turn>"}
    assert tokenizer.encode_parts(["<table>"])[-1] == tokenizer.token_to_id("<table>")


def test_the_space_in_front_is_taken_away_again() -> None:
    for kind in ("first", "always", "legacy"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
        assert b"".join(map(tokenizer.id_to_bytes, tokenizer.encode("hello"))) == b" hello"
    assert TOKENIZERS["bytes"].decode(TOKENIZERS["bytes"].encode(" hello")) == " hello"


def test_halved_surrogates_of_parts() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.decode(tokenizer.encode_parts(["a\ud83d", tokenizer.controls["<s>"], "b"])) == "a\ufffd<s>b"


def test_a_library_tokenizer_is_left_as_it_was() -> None:
    library: Tokenizer = byte_level(["<s>"])
    before = library.to_str()
    ChatTokenizer(library).encode_parts(["a", library.token_to_id("<s>")])
    assert library.to_str() == before
