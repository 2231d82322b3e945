"""What holds for every recipe's parser, whatever the model writes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resin.recipes import (
    Delta,
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
from tests.recipes.byte_tokenizer import CONTROLS, PIECES, ByteTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> <tool_call> #}"
)
TOKENIZER = ByteTokenizer(chat_template=TEMPLATE)
LITERAL = ByteTokenizer(
    [token for token in CONTROLS if "think" not in token and "tool_call" not in token], chat_template=TEMPLATE
)
NAMES = ("jinja", "chatml", "smollm2", "qwen3", "lfm2", "gemma", "gpt_oss", "llama3")
RECIPES = {name: get_native_recipe(name, TOKENIZER) for name in NAMES} | {
    "jinja, literal tags": get_native_recipe("jinja", LITERAL)
}
TOOLS = (Tool("f"),)
SNIPPETS = (
    '{"name": "f", "arguments": {"a": [1, null]}}',
    '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": "\\ud83d"}}',
    "[f(a='x', b=[1, {'k': None}]), g()]",
    "[f(a=",
    "assistant",
    "analysis",
    "commentary to=functions.f ",
    "final",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    " ",
    "\n",
    "Grüße 😀",
)

TOKENS = st.one_of(
    st.sampled_from([TOKENIZER.token_to_id(token) or 0 for token in CONTROLS]).map(lambda token_id: [token_id]),
    st.sampled_from(SNIPPETS).map(lambda text: list(text.encode("utf-8", "replace"))),
    st.integers(0, 255 + len(PIECES)).map(lambda token_id: [token_id]),
    st.integers(-5, 2**40).map(lambda token_id: [token_id]),
)
RESPONSES = st.lists(TOKENS, max_size=24).map(lambda parts: [token_id for part in parts for token_id in part])


def tokenizer_of(name: str) -> ByteTokenizer:
    return LITERAL if name == "jinja, literal tags" else TOKENIZER


def prompt_of(recipe: Recipe) -> list[int]:
    return recipe.render([Message(Role.USER, [Text("Hello")])])


def parse(
    recipe: Recipe, token_ids: list[int], cuts: list[int] | None = None, *, tools: tuple[Tool, ...] = ()
) -> list[Delta]:
    parser = recipe.create_parser(prompt_of(recipe), tools=tools)
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts or []), len(token_ids)]
    deltas: list[Delta] = []
    for begin, end in pairwise(bounds):
        deltas += parser.push(token_ids[begin:end])
    return deltas + parser.finish()


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.arguments if isinstance(delta, ToolCallDelta) else delta.text for delta in deltas)


@pytest.mark.parametrize("name", RECIPES)
@given(token_ids=RESPONSES, cuts=st.lists(st.integers(0, 60), max_size=8), has_tools=st.booleans())
def test_splitting_changes_nothing(name: str, token_ids: list[int], cuts: list[int], has_tools: bool) -> None:
    tools = TOOLS if has_tools else ()
    whole = parse(RECIPES[name], token_ids, tools=tools)
    assert parse(RECIPES[name], token_ids, cuts, tools=tools) == whole


@pytest.mark.parametrize("name", RECIPES)
@given(token_ids=RESPONSES)
def test_special_tokens_never_show(name: str, token_ids: list[int]) -> None:
    # Text that spells a control token may show; what the tokens themselves stand for may not.
    tokenizer = tokenizer_of(name)
    spelled = tokenizer.decode([token_id for token_id in token_ids if 0 <= token_id < tokenizer.first_control])
    text = joined(parse(RECIPES[name], token_ids))
    for token in CONTROLS:
        if token not in spelled and tokenizer.token_to_id(token) in token_ids:
            assert token not in text


@pytest.mark.parametrize("name", RECIPES)
@given(token_ids=RESPONSES)
def test_deltas_are_whole_characters_and_valid(name: str, token_ids: list[int]) -> None:
    calls = [delta for delta in parse(RECIPES[name], token_ids, tools=TOOLS) if isinstance(delta, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    for delta in parse(RECIPES[name], token_ids, tools=TOOLS):
        text = delta.arguments if isinstance(delta, ToolCallDelta) else delta.text
        assert text
        text.encode()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_plain_text_comes_back_whole(name: str, text: str) -> None:
    # Without control tokens every character is answer text; bytes arrive one at a time.
    assert joined(parse(RECIPES[name], list(text.encode()))) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_plain_text_comes_back_whole_in_a_harmony_body(text: str) -> None:
    opening = TOKENIZER.encode("<|channel|>final<|message|>")
    deltas = parse(RECIPES["gpt_oss"], [*opening, *text.encode(), *TOKENIZER.encode("<|return|>")])
    assert joined(deltas) == text


@pytest.mark.parametrize("name", RECIPES)
@given(data=st.binary(max_size=40))
def test_broken_bytes_become_replacement_characters(name: str, data: bytes) -> None:
    if name == "gpt_oss":
        return
    text = joined(parse(RECIPES[name], list(data)))
    expected = data.decode(errors="replace")
    if not any(tag in expected for tag in ("think>", "tool_call>")):
        assert text == expected


@pytest.mark.parametrize("name", ["qwen3", "jinja", "jinja, literal tags"])
def test_reasoning_text_and_calls(name: str) -> None:
    response = (
        "<think>\nLet me see. 😀\n</think>\n\nHere:\n"
        '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>\n'
        "<tool_call>\n{oops}\n</tool_call>\nBye\n<|im_end|>"
    )
    deltas = parse(RECIPES[name], tokenizer_of(name).encode(response))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    assert reasoning == "Let me see. 😀"
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert [(call.index, call.name, call.arguments) for call in calls] == [(0, "f", '{"a": "<b>"}')]
    assert TextDelta("\n{oops}\n", is_incomplete=True) in deltas
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta) and not delta.is_incomplete)
    assert text == "Here:\nBye\n"


@pytest.mark.parametrize(
    "value",
    ["</tool_call>", "a <tool_call> b", r"\"</tool_call>\" </think>", r"\\", r"\\\" </tool_call>", "\\n</tool_call>"],
)
def test_a_tag_in_a_string_of_a_call_is_part_of_the_string(value: str) -> None:
    name = "jinja, literal tags"
    response = f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>Bye<|im_end|>'
    deltas = parse(RECIPES[name], tokenizer_of(name).encode(response))
    assert [delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)] == [f'{{"a": "{value}"}}']
    assert joined([delta for delta in deltas if isinstance(delta, TextDelta)]) == "Bye"


def test_a_string_that_never_ends_does_not_hide_the_next_call() -> None:
    name = "jinja, literal tags"
    response = (
        '<tool_call>\n{"name": "f\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>'
    )
    deltas = parse(RECIPES[name], tokenizer_of(name).encode(response))
    assert [delta.name for delta in deltas if isinstance(delta, ToolCallDelta)] == ["g"]


def test_a_tag_spelled_by_ordinary_tokens_stays_text() -> None:
    deltas = parse(RECIPES["qwen3"], list(b"the <think> tag"))
    assert deltas and all(isinstance(delta, TextDelta) for delta in deltas)
    assert joined(deltas) == "the <think> tag"


def test_reasoning_that_the_prompt_opened() -> None:
    prompt = [*prompt_of(RECIPES["qwen3"]), *TOKENIZER.encode("<think>\n")]
    parser = RECIPES["qwen3"].create_parser(prompt)
    deltas = [*parser.push(TOKENIZER.encode("Hm.\n</think>\n\nYes")), *parser.finish()]
    assert [type(delta) for delta in deltas if joined([delta]) in ("H", "Y")] == [ReasoningDelta, TextDelta]
    assert joined(deltas) == "Hm.Yes"


def test_call_ids_differ_between_prompts_and_repeat_for_the_same() -> None:
    response = TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    ids = []
    for prompt in ([1, 2], [1, 2], [1, 3]):
        (call,) = RECIPES["qwen3"].create_parser(prompt).push(response)
        assert isinstance(call, ToolCallDelta)
        ids.append(call.id)
    assert ids[0] == ids[1] != ids[2]


def test_lfm2_calls_in_python_syntax() -> None:
    response = "<|tool_call_start|>[f(a=\"x\", b=[1, -2.5], c={'k': None}), g()]<|tool_call_end|>Done<|im_end|>"
    deltas = parse(RECIPES["lfm2"], TOKENIZER.encode(response))
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert [(call.name, call.arguments) for call in calls] == [
        ("f", '{"a": "x", "b": [1, -2.5], "c": {"k": null}}'),
        ("g", "{}"),
    ]
    assert joined([delta for delta in deltas if isinstance(delta, TextDelta)]) == "Done"


def test_harmony_channels() -> None:
    response = (
        "<|channel|>analysis<|message|>Need it.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    deltas = parse(RECIPES["gpt_oss"], TOKENIZER.encode(response))
    assert joined([delta for delta in deltas if isinstance(delta, ReasoningDelta)]) == "Need it."
    assert joined([delta for delta in deltas if isinstance(delta, TextDelta)]) == "One moment."
    assert [(call.name, call.arguments) for call in deltas if isinstance(call, ToolCallDelta)] == [("f", '{"a": 1}')]


HEADERS = [
    "<|channel|>commentary to=functions.f <|constrain|>json",
    " to=functions.f<|channel|>commentary",
    "to=functions.f<|channel|>commentary",
    " to=functions.f<|channel|>commentary<|constrain|>json",
    " to=functions.f<|channel|>commentary json",
    "<|channel|>commentary to=functions.f json",
    "<|channel|>commentary to=functions.f code",
    "<|channel|>commentary to=functions.f<|channel|>commentary",
    "<|channel|>analysis to=functions.f<|channel|>commentary<|constrain|>json",
    "<|channel|>analysis to=functions.f code",
    "<|channel|>commentaryjson to=functions.f",
    "<|channel|>commentary<|constrain|>json to=functions.f",
]


@pytest.mark.parametrize("before", ["", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"])
@pytest.mark.parametrize("header", HEADERS)
def test_harmony_calls_however_their_header_is_written(header: str, before: str) -> None:
    deltas = parse(RECIPES["gpt_oss"], TOKENIZER.encode(before + header + '<|message|>{"a": 1}<|call|>'))
    assert joined([delta for delta in deltas if not isinstance(delta, ToolCallDelta)]) == ("Hm" if before else "")
    assert [(call.name, call.arguments) for call in deltas if isinstance(call, ToolCallDelta)] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("header", ["final", "final json", "final <|constrain|>json", "commentary code", "final text"])
def test_a_harmony_header_never_leaks_into_the_text(header: str) -> None:
    response = TOKENIZER.encode(f"<|channel|>{header}<|message|>{{}}<|return|>")
    assert joined(parse(RECIPES["gpt_oss"], response)) == "{}"
    cut = TOKENIZER.encode(f"<|channel|>{header}")
    for length in range(len(cut) + 1):
        assert joined(parse(RECIPES["gpt_oss"], cut[:length])) == ""


def test_a_harmony_message_to_the_assistant_is_no_call() -> None:
    response = TOKENIZER.encode("<|channel|>commentary to=assistant<|message|>{}<|end|>")
    assert joined(parse(RECIPES["gpt_oss"], response)) == "{}"


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_harmony_header_cut_short_shows_nothing(cut: int) -> None:
    response = TOKENIZER.encode("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>fin")
    assert joined(parse(RECIPES["gpt_oss"], response[: len(response) - cut])) == "Hm"


def test_harmony_without_a_header_is_flagged_text() -> None:
    assert parse(RECIPES["gpt_oss"], list(b"Hello")) == [TextDelta("Hello", is_incomplete=True)]


@pytest.mark.parametrize("start", ["", "<|python_tag|>"])
def test_llama3_calls(start: str) -> None:
    response = TOKENIZER.encode(start + '{"name": "f", "parameters": {"a": 1}}<|eom_id|>')
    (call,) = parse(RECIPES["llama3"], response, tools=TOOLS)
    assert isinstance(call, ToolCallDelta)
    assert (call.name, call.arguments) == ("f", '{"a": 1}')


def test_llama3_json_is_text_when_no_tools_are_on_offer() -> None:
    text = '{"name": "f", "parameters": {}}'
    assert joined(parse(RECIPES["llama3"], list(text.encode()))) == text


def test_llama3_cut_call_is_flagged_text() -> None:
    deltas = parse(RECIPES["llama3"], list(b'{"name": "f", "par'), tools=TOOLS)
    assert deltas == [TextDelta('{"name": "f", "par', is_incomplete=True)]
