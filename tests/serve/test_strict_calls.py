"""Free text with strict tools: whatever reaches the client as a call fits, however the model tries."""

from __future__ import annotations

import json

import numpy as np
import pytest

from resin.recipes import Goal, GrammarRecipe, Message, Recipe, Role, Text, TextDelta, Tool, ToolCallDelta
from resin.recipes import get_native_recipe as build_recipe
from serve.structured import GrammarCompiler
from tests.recipes.byte_tokenizer import CONTROLS, ByteTokenizer
from tests.serve.test_structured import LITERAL, OPENED, TEMPLATE, TOKENIZER

TOOL = Tool(
    "go",
    "",
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
)
GOAL = Goal(tools=(TOOL,), is_parallel=False, allows_text=True)


class WithoutSpecialTags(ByteTokenizer):
    """Reasoning and call tags are tokens, and the vocabulary calls them text (as Qwen3's does)."""

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        tags = {self.token_to_id(token) for token in CONTROLS if "think" in token or "tool_" in token}
        self.special_ids = frozenset(self.special_ids - tags)


# Recipe, tokenizer, opening and closing of a call, key of its arguments.
CALL_TAGS = ("<tool_call>", "</tool_call>", "arguments")
FORMATS: dict[str, tuple[str, ByteTokenizer, tuple[str, str, str]]] = {
    "llama3": ("llama3", TOKENIZER, ("", "", "parameters")),
    "llama3 python tag": ("llama3", TOKENIZER, ("<|python_tag|>", "", "parameters")),
    "qwen3": ("qwen3", TOKENIZER, CALL_TAGS),
    "qwen3 text tokens": ("qwen3", WithoutSpecialTags(), CALL_TAGS),
    "jinja": ("jinja", TOKENIZER, CALL_TAGS),
    "jinja text tokens": ("jinja", WithoutSpecialTags(chat_template=TEMPLATE), CALL_TAGS),
    "jinja plain text": ("jinja", LITERAL, CALL_TAGS),
    "jinja thinking": ("jinja", OPENED, CALL_TAGS),
    "lfm2": ("lfm2", TOKENIZER, ("<|tool_call_start|>", "<|tool_call_end|>", "arguments")),
}
BEFORE = (
    "",
    "\n",
    " \x1c\t",
    "Well. ",
    "<",
    "<think>\nHm.",
    "<think>\nHm.\n</think>\n\n",
    "</think>",
    "Hm.</think>\n\nSo ",
)
ARGUMENTS = ("{}", '{"n": "1"}', '{"n": 1, "m": 2}', '"{}"', "[1]")


def build(name: str) -> tuple[Recipe, ByteTokenizer, tuple[str, str, str]]:
    recipe_name, tokenizer, call = FORMATS[name]
    return build_recipe(recipe_name, tokenizer), tokenizer, call


def say(recipe: Recipe, tokenizer: ByteTokenizer, compiler: GrammarCompiler, ids: list[int]) -> list[int]:
    """As much of the ids as the grammar lets a model say."""
    assert isinstance(recipe, GrammarRecipe)
    prompt = recipe.render([Message(Role.USER, [Text("x")])], (TOOL,))
    (mask,) = compiler.compile(recipe.write_grammar(GOAL, prompt), 1, "tools")
    said: list[int] = []
    for token in ids:
        allowed = np.unpackbits(mask(said).view(np.uint8), bitorder="little")
        if not allowed[token]:
            break
        said.append(token)
    return said


def parse(recipe: Recipe, ids: list[int]) -> tuple[list[ToolCallDelta], str]:
    prompt = recipe.render([Message(Role.USER, [Text("x")])], (TOOL,))
    parser = recipe.create_parser(prompt, tools=(TOOL,))
    deltas = [*parser.push(ids), *parser.finish()]
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    return calls, "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_does_not_fit_cannot_be_said(name: str) -> None:
    recipe, tokenizer, (opening, closing, key) = build(name)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, recipe.stop_token_ids)
    refused = 0
    for before in BEFORE:
        for arguments in ARGUMENTS:
            call = f'{opening}{{"name": "go", "{key}": {arguments}}}{closing}'
            ids = tokenizer.encode(before + call)
            said = say(recipe, tokenizer, compiler, ids)
            assert not parse(recipe, said)[0], before + call
            refused += len(said) < len(ids)
    assert refused


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_call_cannot_be_said_where_one_is_wanted(name: str) -> None:
    recipe, tokenizer, (opening, closing, key) = build(name)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, recipe.stop_token_ids)
    body = f'{{"name": "go", "{key}": {{"n": 1}}}}'
    inside = "[{}]" if name == "lfm2" else "{}"
    for before in ("", "Hm.</think>"):
        for between in ("", "\n", "; ", ", ", "Then: "):
            ids = tokenizer.encode(f"{before}{opening}{body}{closing}{between}{opening}{body}{closing}")
            assert len(parse(recipe, say(recipe, tokenizer, compiler, ids))[0]) <= 1
            ids = tokenizer.encode(opening + inside.format(f"{body}{between}{body}") + closing)
            assert len(parse(recipe, say(recipe, tokenizer, compiler, ids))[0]) <= 1


@pytest.mark.parametrize("name", FORMATS)
def test_text_and_calls_that_fit_can_be_said(name: str) -> None:
    recipe, tokenizer, (opening, closing, key) = build(name)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, recipe.stop_token_ids)
    thoughts = "Hm.</think>\n\n" if name == "jinja thinking" else ""
    end = recipe.stop_token_ids[0]
    body = f'{{"name": "go", "{key}": {{"n": 1}}}}'
    call = opening + (f"[{body}]" if name == "lfm2" else body) + closing
    for text in ("Hello {1} <b>.", "Let <x> be.\n\n", " {", "\n"):
        ids = [*tokenizer.encode(thoughts + (text if name[:6] != "llama3" else text.replace(" {", " x{"))), end]
        assert say(recipe, tokenizer, compiler, ids) == ids
        assert not parse(recipe, ids)[0]
    for text in ("", "Let me see. "):
        if text and name[:6] == "llama3":  # a call is the whole answer
            continue
        ids = [*tokenizer.encode(thoughts + text + call), end]
        assert say(recipe, tokenizer, compiler, ids) == ids, text
        (found,), words = parse(recipe, ids)
        assert (json.loads(found.arguments), words.strip()) == ({"n": 1}, text.strip())
