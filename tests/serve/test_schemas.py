"""JSON Schemas that clients send: what binds, what is an annotation, and what is refused with its reason."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resin.plan import InvalidRequest
from resin.recipes import Goal, Message, Role, Text, Tool, get_native_recipe
from resin.recipes.calls import MAX_NESTING
from resin.recipes.grammar import _FORMATS, json_rule
from serve import HttpServer
from serve.errors import ApiError
from serve.structured import GrammarCompiler, is_bound, write_grammar
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner
from tests.serve.test_fields import post
from tests.serve.test_structured import RECIPES, SCHEMA, fits

CHATML = get_native_recipe("chatml", TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, CHATML.stop_token_ids)
ASK = [{"role": "user", "content": "x"}]


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}}


def said(schema: dict[str, Any], text: str) -> str:
    """As much of the text as the schema's grammar allows."""
    (mask,) = COMPILER.compile(write_grammar(CHATML, Goal(schema=schema), [], "schema"), 1, "schema")
    ids: list[int] = []
    for token in TOKENIZER.encode(text):
        if not np.unpackbits(mask(ids).view(np.uint8), bitorder="little")[token]:
            break
        ids.append(token)
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize("known", sorted(_FORMATS))
def test_known_formats_bind(known: str) -> None:
    assert said({"type": "string", "format": known}, '"@ x"') != '"@ x"'


@pytest.mark.parametrize("unknown", ["phone", "int64", "regex", "byte", "", "DATE", "uri-reference"])
def test_unknown_formats_are_annotations(unknown: str) -> None:
    leaf = {"type": "string", "format": unknown}
    for schema, text in (
        (leaf, '"@ x"'),
        ({"$ref": "#/$defs/a", "$defs": {"a": leaf}}, '"@ x"'),
        ({"type": "object", "properties": {"format": leaf}, "required": ["format"]}, '{"format": "@"}'),
        ({"type": "array", "items": {"anyOf": [leaf, {"type": "null"}]}}, '["@", null]'),
    ):
        assert said(schema, text) == text
    # Where it is data, it stays.
    assert said({"const": {"format": unknown}}, json.dumps({"format": unknown})) == json.dumps({"format": unknown})
    assert said({"enum": [{"format": unknown}]}, '{"x"') == '{"'


@pytest.mark.parametrize(
    "schema", [SCHEMA, {"type": "object"}, {"const": {"a": [1]}}, {"type": "array", "items": {"type": "integer"}}]
)
def test_white_space_comes_to_an_end(schema: dict[str, Any]) -> None:
    """From every place of a document, blanks and breaks alone lead on for no more than a line."""
    (mask,) = COMPILER.compile(CHATML.write_grammar(Goal(schema=schema), []), 1, "schema")  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    ids: list[int] = []
    for _ in range(60):
        allowed = np.flatnonzero(np.unpackbits(mask(ids).view(np.uint8), bitorder="little"))
        quotes = len(re.findall(r'(?<!\\)"', TOKENIZER.decode(ids)))
        blank = list(ids)
        while quotes % 2 == 0 and len(blank) - len(ids) < 100:
            spaces = np.unpackbits(mask(blank).view(np.uint8), bitorder="little")
            choices = [token for token in b"\n\t \r" if spaces[token]]
            if not choices:
                break
            blank.append(choices[0])
        assert len(blank) - len(ids) <= 33
        assert blank[len(ids) :].count(10) <= 1
        shown = [token for token in allowed.tolist() if token not in {*b"\n\t \r"}]
        ids.append(int(rng.choice(shown)))
        if ids[-1] in CHATML.stop_token_ids:
            break


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("text", ["<tool_call>", "</think>", "x<|im_end|>y", "<|python_tag|>"])
def test_given_text_may_spell_control_tokens(name: str, text: str) -> None:
    recipe, tokenizer = RECIPES[name]
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, recipe.stop_token_ids)
    grammar = f"start: {json_rule({'const': text})}\n"
    (mask,) = compiler.compile(grammar, 1, "schema")
    ids = [*json.dumps(text).encode(), recipe.stop_token_ids[0]]
    for place, token in enumerate(ids):
        assert np.unpackbits(mask(ids[:place]).view(np.uint8), bitorder="little")[token]


CANNOT_START: dict[str, dict[str, Any]] = {
    "cyclic": {"$ref": "#"},
    "cyclic by two": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "options": optional(3000),
    "options in a list": {"type": "array", "items": optional(1000), "minItems": 1},
    "options in a field": {"type": "object", "properties": {"a": optional(1000)}, "required": ["a"]},
    "string": {"const": "x" * 40_000},
    "key": {"type": "object", "required": ["k" * 40_000], "properties": {"k" * 40_000: {}}},
    # These ended the process, from within llguidance.
    "lowest integer": {"const": -(2**63)},
    "rounded to the lowest integer": {"enum": [{"a": [1 - 2**63]}]},
    "range at the lowest integer": {"type": "integer", "minimum": -1e19, "maximum": -1e19},
    "nothing": {"enum": []},
    "contradiction": {"type": "integer", "minimum": 5, "maximum": 4},
    "keyword": {"not": {"type": "string"}},
    "pattern": {"type": "string", "pattern": "(a"},
    "reference": {"$ref": "#/$defs/none"},
    "of the wrong kind": {"properties": 5},
}


NUMBERS = st.sampled_from([sign * 2**bits for bits in (53, 63, 64) for sign in (1, -1)])
NUMBERS |= st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3)
DATA = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object", "fish"])
KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": TYPES | st.lists(TYPES, max_size=2),
    "pattern": st.sampled_from(["^a+$", "(", "(a|b)*", "(?=x)", "a{1,99}"]),
    "format": st.sampled_from(["date", "phone", "uuid"]) | DATA,
    **dict.fromkeys(("enum", "required"), st.lists(DATA, max_size=2)),
    **dict.fromkeys(("const", "default", "x-guidance", "not", "uniqueItems"), DATA),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength", "minProperties"), NUMBERS),
    "$ref": st.sampled_from(["#", "#/$defs/a", "#/none", "http://x/y"]),
}


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, max_size=2)
    named = st.dictionaries(st.sampled_from(["a", "b", "format", 'q"']), inner, max_size=2)
    nesting = dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), several)
    nesting |= dict.fromkeys(("properties", "patternProperties", "$defs"), named)
    nesting |= dict.fromkeys(("items", "additionalProperties"), inner)
    return st.fixed_dictionaries({}, optional=KEYWORDS | nesting)


@settings(max_examples=25)
@given(schema=st.recursive(st.fixed_dictionaries({}, optional=KEYWORDS) | st.booleans(), schemas, max_leaves=6))
def test_any_schema_is_followed_or_refused(schema: Any) -> None:
    """Whatever it says, the process lives and the fault is the schema's."""
    try:
        said({"type": "array", "items": schema}, '[{"a": [0, "x"')
    except ApiError as error:
        assert error.status == 400 and error.message.startswith("schema: this schema is not supported: ")
    except InvalidRequest as error:
        assert "expected one that can be followed" in str(error)


@pytest.mark.parametrize("name", CANNOT_START)
async def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(server: HttpServer, name: str) -> None:
    schema = CANNOT_START[name]
    tool = {"name": "f", "parameters": schema, "strict": True}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            "response_format",
        ),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": tool}]}, "tools"),
        (
            "/v1/messages",
            {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
    ]
    for path, change, param in bodies:
        if param == "tools" and len(json.dumps(schema)) > 4000:  # too long for the prompt
            continue
        status, answer = await post(server, path, {"messages": ASK} | change)
        assert status == 400, answer
        assert re.match(rf"{re.escape(param)}\b.*(not supported|expected)", answer["error"]["message"]), answer


async def test_a_schema_that_fails_on_the_way_is_the_requests_fault() -> None:
    runner = ScriptedRunner()
    runner.answer("[deep]", '{"a": 1, "b": {}}')
    either = {"anyOf": [optional(400), {**optional(400), "additionalProperties": False}]}
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": either}, "required": ["a", "b"]}
    format = {"type": "json_schema", "json_schema": {"schema": schema}}
    with running_server(runner) as server:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "[deep]"}], "response_format": format}
        status, answer = await post(server, "/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "response_format")
        status, events = await post(server, "/v1/chat/completions", body | {"stream": True})
        assert status == 200 and '"param":"response_format"' in events


def nested(levels: int) -> dict[str, Any]:
    """A schema that is a dictionary `levels` deep."""
    schema: dict[str, Any] = {"type": "object"} if levels % 2 else {}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema if levels % 2 else {"items": schema}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_nested_as_deep_as_bodies_may_be_is_rendered(name: str) -> None:
    recipe, _ = RECIPES[name]
    try:
        recipe.render([Message(Role.USER, [Text("x")])], [Tool("f", "", nested(MAX_NESTING))])
    except InvalidRequest as error:
        assert "no tools" in str(error)


@pytest.mark.parametrize("levels", [MAX_NESTING - 1, MAX_NESTING, MAX_NESTING + 1, 330, 900])
async def test_deep_objects_are_answered_or_refused_by_name(server: HttpServer, levels: int) -> None:
    schema = nested(levels)
    calls = [{"function": {"name": "f", "arguments": json.dumps(schema)}}] if levels < 900 else []
    turns: list[dict[str, Any]] = [*ASK, {"role": "assistant", "tool_calls": calls}, *ASK]
    for strict in (False, True):
        chat = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]}
        claude = {"tools": [{"name": "f", "input_schema": schema, "strict": strict}], "max_tokens": 9}
        answers = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
        for path, change in (
            ("/v1/chat/completions", {"messages": turns} | chat),
            ("/v1/messages", {"messages": ASK} | claude),
            ("/v1/responses", {"input": "x", "tools": [answers]}),
            ("/v1/messages/count_tokens", {"messages": ASK} | claude),
            ("/tokenize", {"messages": ASK} | chat),
        ):
            status, answer = await post(server, path, change)
            if levels > MAX_NESTING:
                assert status == 400
                assert levels > 500 or "tools[0]" in answer["error"]["message"]
            else:  # some prompts are too long, and some schemas more than grammars can say
                reasons = ("context holds", "not supported") if strict else ("context holds",)
                assert status == 200 or any(reason in answer["error"]["message"] for reason in reasons), answer


def test_an_unsupported_schema_is_named_before_anything_runs() -> None:
    with pytest.raises(ApiError) as caught:
        COMPILER.compile(CHATML.write_grammar(Goal(schema={"$ref": "#"}), []), 1, "here")  # type: ignore[attr-defined]
    assert caught.value.message == "here: this schema is not supported: no text fits it"


def test_a_format_without_grammars_may_still_be_asked_for_text() -> None:
    assert not is_bound(None, Goal(allows_text=True)) and not is_bound(CHATML, None)
    assert is_bound(CHATML, Goal(allows_text=True)) and is_bound(None, Goal(tools=(Tool("f"),)))


def test_strictness_is_each_tools_own() -> None:
    from serve.planning import ToolUse, goal_of

    tools = (Tool("a", "", SCHEMA), Tool("b", "", SCHEMA))
    for use, parameters in (
        (ToolUse(tools, strict=frozenset({"b"})), [{}, SCHEMA]),
        (ToolUse(tools, is_parallel=False), [{}, {}]),
        (ToolUse(tools, required=True), [SCHEMA, SCHEMA]),
        (ToolUse(tools, only="a"), [SCHEMA]),
    ):
        goal, _ = goal_of(use, None)
        assert goal is not None and [tool.parameters for tool in goal.tools] == parameters


async def test_one_strict_tool_leaves_the_others_free(server: HttpServer) -> None:
    """The script calls `weather` with arguments that fit no schema of this test."""
    strict = {"name": "other", "parameters": SCHEMA, "strict": True}
    for options, is_free in (({}, True), ({"strict": False}, True), ({"strict": True}, False)):
        loose = {"name": "weather", "parameters": SCHEMA, **options}
        tools = [{"type": "function", "function": function} for function in (strict, loose)]
        body = {"messages": [{"role": "user", "content": "[calls]"}], "tools": tools}
        _, answer = await post(server, "/v1/chat/completions", body)
        (call, *_) = answer["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert (arguments == {"city": "Bonn"}) == is_free
        assert is_free or fits(arguments)


@pytest.mark.parametrize("recipe", ["qwen3", "lfm2", "gpt_oss", "llama3"])
async def test_tools_that_may_not_be_called_are_not(recipe: str) -> None:
    runner = ScriptedRunner()
    for opening in ("<tool_call>", "<|tool_call_start|>", "<|python_tag|>"):
        call = json.dumps({"name": "f", "arguments": {}})
        runner.answer(f"[{opening[1:-1]}]", f"Hm. {opening}{call}")
    runner.answer("[harmony]", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>")
    tool: dict[str, Any] = {"name": "f", "parameters": {}}
    with running_server(runner, recipe=recipe) as server:
        for key in ("tool_call", "|tool_call_start|", "|python_tag|", "harmony"):
            ask = [{"role": "user", "content": f"[{key}]"}]
            chat = {"messages": ask, "tools": [{"type": "function", "function": tool}], "tool_choice": "none"}
            _, answer = await post(server, "/v1/chat/completions", chat | {"max_tokens": 90})
            assert "tool_calls" not in answer["choices"][0]["message"], answer
            body = {"input": f"[{key}]", "tools": [{"type": "function", **tool}], "tool_choice": "none"}
            _, answer = await post(server, "/v1/responses", body | {"max_output_tokens": 90})
            assert "function_call" not in [item["type"] for item in answer["output"]]
            claude = {"messages": ask, "tools": [{"name": "f"}], "tool_choice": {"type": "none"}, "max_tokens": 90}
            _, answer = await post(server, "/v1/messages", claude)
            assert "tool_use" not in [block["type"] for block in answer["content"]]
