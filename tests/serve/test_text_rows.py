"""Logprob rows are those of the tokens whose text the client sees, for every format and stop string."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resin import FinishReason
from resin.events import TokensEvent
from resin.recipes import Tool, get_native_recipe
from serve.generation import Generation, PlainParser, Update
from serve.text_rows import ScoredText, TextRows
from tests.recipes.byte_tokenizer import ByteTokenizer
from tests.serve.conftest import WORDS
from tests.serve.test_strict_calls import FORMATS, build

PIECES = (
    *("<think>", "</think>", "think", "<", "\n", "\n\n", " ", "Hm", "stop", "st", "é😀", "x"),
    *("<tool_call>", "</tool_call>", '{"name": "go", "arguments": {}}', "<|python_tag|>", "[go()]"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "{}", "<|channel|>", "<|im_end|>"),
)
EVENT = {"requests": (), "token_indptr": np.zeros(1, np.int64)}


def generate(generation: Generation, batches: list[list[int]]) -> Update:
    """Everything that comes of the tokens."""
    whole = Update()
    for ids in batches:
        event = TokensEvent(token_ids=np.array(ids, np.int32), logprobs=np.arange(len(ids), dtype=np.float32), **EVENT)
        generation.add_tokens(ids, event, 0)
        whole.extend(generation.take_update())
    if generation.ending is None:
        generation.finish(FinishReason.STOP, None)
        whole.extend(generation.take_update())
    return whole


def spelled(update: Update, tokenizer: ByteTokenizer) -> bytes:
    return b"".join(tokenizer.id_to_bytes(row.token_id) for row in update.text_logprobs)


@pytest.mark.parametrize("name", [*FORMATS, "gpt_oss", "plain"])
@settings(max_examples=50)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    stops=st.sampled_from([[], ["stop"], ["x<", "\n\n"]]),
    cuts=st.lists(st.integers(0, 80), max_size=4),
)
def test_the_rows_spell_the_text(name: str, pieces: list[str], stops: list[str], cuts: list[int]) -> None:
    recipe, tokenizer, _ = build(name if name in FORMATS else "qwen3")
    prompt = tokenizer.encode("<|start|>assistant<|channel|>final<|message|>")
    if name == "gpt_oss":
        recipe = get_native_recipe("gpt_oss", tokenizer)
    parser = PlainParser(tokenizer) if name == "plain" else recipe.create_parser(prompt, tools=(Tool("go"),))
    generation = Generation(parser, stops=stops, text_rows=TextRows(tokenizer))
    if "text tokens" in name:  # a tag's own characters may look like text beside it
        pieces = [piece for piece in pieces if piece not in ("<", "think")]
    ids = tokenizer.encode("".join(pieces))
    places = [0, *sorted(cuts), len(ids)]
    update = generate(generation, [ids[begin:end] for begin, end in pairwise(places)])
    assert spelled(update, tokenizer) == update.text.encode()
    for delta in update.deltas:
        if isinstance(delta, ScoredText):
            assert b"".join(tokenizer.id_to_bytes(row.token_id) for row in delta.logprobs) == delta.text.encode()


def test_a_token_that_is_text_in_part_counts() -> None:
    recipe, tokenizer, _ = build("jinja plain text")
    generation = Generation(recipe.create_parser([]), text_rows=TextRows(tokenizer), stops=["lo w"])
    first = tokenizer.first_control - 9
    thinking = [first, first + 1]  # "<th", "ink>"
    ids = [*thinking, *b"Hm</", *b"think>", first + 7, *b" hel", *b"lo world"]
    update = generate(generation, [ids])
    assert update.text == "the hel"
    assert [row.token_id for row in update.text_logprobs] == [first + 7, *b" hel"]


def test_every_token_has_a_row_where_all_are_wanted() -> None:
    recipe, tokenizer, _ = build("qwen3")
    ids = tokenizer.encode("<think>Hm</think>Hi<|im_end|>")
    update = generate(Generation(recipe.create_parser([]), wants_logprobs=True), [ids])
    assert [row.token_id for row in update.logprobs] == ids and update.text_logprobs == []


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("[think]", {}, "Forty-two."),
        ("[think and call]", {"tools": TOOLS}, "Wait."),
        ("[words]", {"stop": ["quick"]}, "The "),
        ("[words]", {}, WORDS),
    ],
)
def test_chat_reports_the_content_alone(client: openai.OpenAI, prompt: str, options: Any, text: str) -> None:
    asked: Any = {"model": "scripted", "messages": ask(prompt), "logprobs": True} | options
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == text
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert b"".join(bytes(row.bytes or []) for row in whole.logprobs.content).decode() == text
    for chunk in client.chat.completions.create(stream=True, **asked):
        choice = chunk.choices[0]
        rows: list[Any] = (choice.logprobs.content or []) if choice.logprobs else []
        assert b"".join(bytes(row.bytes or []) for row in rows).decode() == (choice.delta.content or "")


def test_responses_give_each_message_its_own_rows(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "weather"}]}
    response = client.responses.create(model="scripted", input="[think and call]", **options)
    parts = [item.content[0] for item in response.output if item.type == "message"]
    assert [part.text for part in parts if part.type == "output_text"] == ["Wait."]
    assert [row.token for part in parts if part.type == "output_text" for row in part.logprobs or []] == [*"Wait."]


def test_completions_leave_the_stop_string_out(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="[words]", max_tokens=50, logprobs=0, stop="quick")
    assert answer.choices[0].text == "The " and answer.choices[0].logprobs is not None
    assert "".join(answer.choices[0].logprobs.tokens or []) == "The "
