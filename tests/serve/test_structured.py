"""Structured output: whatever the model would rather say, what it says fits."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.recipes import (
    Delta,
    Goal,
    GrammarRecipe,
    Message,
    ReasoningDelta,
    Recipe,
    Role,
    Text,
    TextDelta,
    Tool,
    ToolCallDelta,
    get_native_recipe,
)
from resin.runtime import RunnerOptions, build_runner
from serve.errors import ApiError
from serve.structured import GrammarCompiler, GrammarFailed
from tests.recipes.byte_tokenizer import CONTROLS, ByteTokenizer
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER as SCRIPTED_TOKENIZER

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> <tool_call> #}"
)
TOKENIZER = ByteTokenizer(chat_template=TEMPLATE)
LITERAL = ByteTokenizer(
    [token for token in CONTROLS if "think" not in token and "tool_" not in token], chat_template=TEMPLATE
)
OPENED = ByteTokenizer(chat_template=TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%"))
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "size": {"enum": [0, 7]},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["kind", "size", "tags"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
}
TOOLS = (
    Tool('say"it', "", SCHEMA),
    Tool("go", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)
TEXT_NAMES = ("chatml", "gemma")
TOOL_NAMES = ("jinja", "qwen3", "lfm2", "gpt_oss", "llama3", "literal", "opened")


def build(name: str) -> tuple[Recipe, ByteTokenizer]:
    tokenizer = {"literal": LITERAL, "opened": OPENED}.get(name, TOKENIZER)
    recipe_name = "jinja" if name in ("literal", "opened") else name
    return get_native_recipe(recipe_name, tokenizer), tokenizer


RECIPES = {name: build(name) for name in (*TEXT_NAMES, *TOOL_NAMES)}
COMPILERS = {
    name: GrammarCompiler(tokenizer, tokenizer.vocab_size + 40, recipe.stop_token_ids)
    for name, (recipe, tokenizer) in RECIPES.items()
}


# Some walks do not end in time, and are rejected.
WALKS = settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much])


def babble(name: str, goal: Goal, seed: int) -> list[Delta]:
    """A response drawn at random from what the masks allow, and its parse."""
    recipe, tokenizer = RECIPES[name]
    assert isinstance(recipe, GrammarRecipe)
    prompt = recipe.render([Message(Role.USER, [Text("x")])])  # type: ignore[attr-defined]
    (mask,) = COMPILERS[name].compile(recipe.write_grammar(goal, prompt), 1, "schema")
    draw = random.Random(seed)
    output: list[int] = []
    for _ in range(600):
        allowed = np.flatnonzero(np.unpackbits(mask(output).view(np.uint8), bitorder="little"))
        assert allowed.size
        assert allowed.max() < tokenizer.vocab_size
        controls = [token for token in allowed.tolist() if token >= tokenizer.first_control]
        printable = [token for token in allowed.tolist() if 32 < token < 127]
        # Control tokens and the ends of things come often enough for the walk to end.
        ends = [token for token in printable if chr(token) in '"}]<']
        pool = controls if controls and draw.random() < 0.5 else ends if ends and draw.random() < 0.5 else None
        token = draw.choice(pool or printable or allowed.tolist())
        output.append(token)
        if token in recipe.stop_token_ids:  # type: ignore[attr-defined]
            parser = recipe.create_parser(prompt)  # type: ignore[attr-defined]
            if name == "llama3":
                parser = recipe.create_parser(prompt, tools=goal.tools)  # type: ignore[attr-defined]
            return [*parser.push(output), *parser.finish()]
    reject()


def fits(value: Any) -> bool:
    return (
        list(value) == ["kind", "size", "tags"]
        and value["kind"] in ("a", "b")
        and isinstance(value["size"], int)
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


@pytest.mark.parametrize("name", RECIPES)
@WALKS
@given(seed=st.integers(0, 2**32))
def test_json_answers_fit_their_schema(name: str, seed: int) -> None:
    deltas = babble(name, Goal(schema=SCHEMA), seed)
    assert all(isinstance(delta, TextDelta | ReasoningDelta) for delta in deltas)
    assert fits(json.loads("".join(delta.text for delta in deltas if isinstance(delta, TextDelta))))


@pytest.mark.parametrize("name", TOOL_NAMES)
@WALKS
@given(seed=st.integers(0, 2**32), is_parallel=st.booleans())
def test_required_calls_fit_their_tools(name: str, seed: int, is_parallel: bool) -> None:
    deltas = babble(name, Goal(tools=TOOLS, is_parallel=is_parallel), seed)
    assert not [delta for delta in deltas if isinstance(delta, TextDelta)]
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert calls and (is_parallel or len(calls) == 1)
    for call in calls:
        arguments = json.loads(call.arguments)
        assert fits(arguments) if call.name == TOOLS[0].name else (call.name, arguments) == ("go", {})


@pytest.mark.parametrize("name", TOOL_NAMES)
@WALKS
@given(seed=st.integers(0, 2**32))
def test_text_or_strict_calls(name: str, seed: int) -> None:
    deltas = babble(name, Goal(tools=TOOLS, allows_text=True), seed)
    # Text may happen to begin like a call of Llama 3, whose calls have no tags.
    assert name == "llama3" or not [d for d in deltas if isinstance(d, TextDelta) and d.is_incomplete]
    for call in (delta for delta in deltas if isinstance(delta, ToolCallDelta)):
        assert call.name == "go" or fits(json.loads(call.arguments))


def test_masks_of_choices_are_independent_and_follow_a_shorter_output() -> None:
    recipe, _ = RECIPES["chatml"]
    assert isinstance(recipe, GrammarRecipe)
    first, second = COMPILERS["chatml"].compile(recipe.write_grammar(Goal(schema={"const": "ab"}), []), 2, "x")
    start = first([])
    assert (first([ord('"')]) != start).any()
    assert (second([]) == start).all()
    assert (first([]) == start).all()
    with pytest.raises(GrammarFailed):
        first([ord("x")])


def test_schemas_that_are_not_supported_name_their_field() -> None:
    recipe, _ = RECIPES["chatml"]
    assert isinstance(recipe, GrammarRecipe)
    for schema in ({"type": "fish"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        with pytest.raises(ApiError) as caught:
            COMPILERS["chatml"].compile(recipe.write_grammar(Goal(schema=schema), []), 1, "response_format")
        assert (caught.value.status, caught.value.param) == (400, "response_format")


def ask(text: str) -> Any:
    return [{"role": "user", "content": text}]


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def test_response_format_over_http(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    answer = client.chat.completions.create(model="scripted", messages=ask("[words]"), response_format=format, n=2)
    for choice in answer.choices:
        assert fits(json.loads(choice.message.content or ""))
        assert choice.finish_reason == "stop"
    answer = client.chat.completions.create(
        model="scripted", messages=ask("[words]"), response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_choice_over_http(client: openai.OpenAI, stream: bool) -> None:
    tools = [tool("alpha"), tool("beta")]
    for choice, names in (
        ("required", {"alpha", "beta"}),
        ({"type": "function", "function": {"name": "beta"}}, {"beta"}),
    ):
        options: Any = {"model": "scripted", "messages": ask("[start a call]"), "tools": tools, "tool_choice": choice}
        if stream:
            chunks = list(client.chat.completions.create(stream=True, **options))
            finish = chunks[-1].choices[0].finish_reason
            calls: Any = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        else:
            answer = client.chat.completions.create(**options)
            finish, calls = answer.choices[0].finish_reason, answer.choices[0].message.tool_calls
            assert answer.choices[0].message.content is None
        assert finish == "tool_calls"
        assert {call.function.name for call in calls} <= names
        assert all(fits(json.loads(call.function.arguments)) for call in calls)


def test_tool_choice_none_offers_no_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=ask("x"), tools=[tool("alpha", description="[words]")], tool_choice="none"
    )
    assert answer.choices[0].message.content == "Hello!"


def test_strict_tools_leave_text_alone(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=ask("x"), tools=[tool("alpha", strict=True)])
    assert answer.choices[0].message.content == "Hello!"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [tool("alpha")]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "fish"}}}}, "response_format"),
    ],
)
def test_choices_that_cannot_be_met(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=ask("x"), **change)
    assert caught.value.param == param


def test_an_enum_with_min_tokens_ends_where_the_grammar_does() -> None:
    """Only the end is left long before the minimum: the model's own sampler must take it."""
    config = {**TINY_CONFIGS["llama"], "vocab_size": SCRIPTED_TOKENIZER.vocab_size}
    options = RunnerOptions(
        max_sequences=2, max_context_tokens=512, decode_sequences=(2,), prefill_tokens=(128,), compile_cache_bytes=0
    )
    runner: Any = build_runner(random_checkpoint(config, seed=5), options)
    runner.tokenizer, runner.fails_with = SCRIPTED_TOKENIZER, None
    schema = {"enum": ["ab", "ba"]}
    format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    with running_server(runner, recipe="chatml") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0)
        for temperature in (0, 1):
            answer = client.chat.completions.create(
                model="scripted",
                messages=ask("x"),
                temperature=temperature,
                response_format=format,
                max_tokens=100,
                extra_body={"min_tokens": 90, "seed": 1},
            )
            assert json.loads(answer.choices[0].message.content or "") in schema["enum"]
            assert answer.choices[0].finish_reason == "stop"
