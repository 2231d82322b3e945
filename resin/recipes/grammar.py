"""What a response may look like, as a Lark grammar in the dialect of the `llguidance` library.

In that dialect `<[7]>` is the token with id 7, `%json {...}` is text that fits a JSON Schema, and a response may end
wherever the grammar is complete. Recipes write grammars; whoever runs them turns them into token masks, in which no
control token of the tokenizer is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from resin.plan.errors import InvalidRequest
from resin.recipes.messages import Tool
from resin.recipes.recipe import Tokenizer
from resin.recipes.script import atomic_id
from resin.recipes.tagged import Tags


@dataclass(frozen=True, slots=True)
class Goal:
    """What the answer must be: one of the things named here. Reasoning may always come first.

    Attributes:
        schema: JSON that fits this JSON Schema; None if that is not on offer.
        tools: at least one call of these tools, with arguments that fit their schemas.
        is_parallel: several calls are fine.
        allows_text: free text is fine too, before calls as well.
    """

    schema: Mapping[str, Any] | None = None
    tools: tuple[Tool, ...] = ()
    is_parallel: bool = True
    allows_text: bool = False


@runtime_checkable
class GrammarRecipe(Protocol):
    """A recipe that can say what a response to a rendered prompt must look like."""

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str: ...


FREE_TEXT = "/(?s:.+)/"

JSON_SPACE = r"\x20|\n(\x20{0,32}|\t{0,8})"
"""Between two tokens of JSON at most a space, or one line break and the next line's indentation."""

_FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Values of `format` that llguidance enforces. To JSON Schema all others are annotations."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples", "required")


def token_or_text(tokenizer: Tokenizer, text: str) -> str:
    """A token's id where the vocabulary has the text as one control token, else the text itself."""
    token_id = atomic_id(tokenizer, text)
    return quote(text) if token_id is None else f"<[{token_id}]>"


def quote(text: str) -> str:
    """A literal."""
    return json.dumps(text)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Text that fits a schema."""
    options = {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return f"%json {json.dumps(_without_annotations(schema) | options)}"


def _without_annotations(schema: Any) -> Any:
    """The schema without the formats that bind nobody."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: _without_annotations(item) for name, item in value.items()}
        else:
            kept[key] = value if key in _DATA else _without_annotations(value)
    return kept


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments; any object if it has none."""
    return tool.parameters or {"type": "object"}


def json_call_rules(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """Rules for `call_body`: one JSON object with a tool's name and its arguments."""
    rules = ["call_body: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments_key}": '
        rules += [f'call_{index}: {quote(head)} arguments_{index} "}}"']
        rules += [f"arguments_{index}: {json_rule(arguments_schema(tool))}"]
    return rules


def answer_rules(goal: Goal, *, text: str = FREE_TEXT, text_before_calls: str = "text calls") -> list[str]:
    """`answer` in terms of `calls`, which the format has to define if there are tools.

    Args:
        goal: what the answer must be.
        text: what free text is. It must leave out what the format's parser takes for a call.
        text_before_calls: how calls follow text; "" if they cannot.
    """
    options = ["calls"] if goal.tools else []
    rules = []
    if goal.schema is not None:
        options.append("json_answer")
        rules.append(f"json_answer: {json_rule(goal.schema)}")
    if goal.allows_text:
        options += ["text", text_before_calls] if goal.tools and text_before_calls else ["text"]
        rules += [f"TEXT: {text}", "text: TEXT"]  # regular expressions in capitals can be intersected
    return ["answer: " + " | ".join(options), *rules]


def tagged_grammar(tokenizer: Tokenizer, tags: Tags, goal: Goal, *, inside_reasoning: bool, call_list: bool) -> str:
    """The grammar of formats that mark reasoning and calls with tags.

    A tag that is a token cannot occur in text. One that is text ends the text wherever it is complete, because that is
    where the parser sees it.

    Args:
        tokenizer: tells tags that are tokens from tags that are text.
        tags: the format's tags; it must have call tags if the goal has tools.
        goal: what the answer must be.
        inside_reasoning: the prompt has opened the reasoning block.
        call_list: all calls stand in one pair of tags, as a JSON list.
    """
    rules = []
    opens_call = ""
    if tags.tool_call and atomic_id(tokenizer, tags.tool_call[0]) is None:
        opens_call = _regex_of(tags.tool_call[0])
    no_call = f" & ~/(?s:.*){opens_call}(?s:.*)/" if opens_call else ""
    start, text_before_calls = "answer", "text calls"
    if tags.reasoning is not None:
        opening, closing = (token_or_text(tokenizer, tag) for tag in tags.reasoning)
        if atomic_id(tokenizer, tags.reasoning[1]) is not None:
            rules += [f"THOUGHTS: {FREE_TEXT}{no_call}", f"thoughts: THOUGHTS? {closing}"]
        else:
            rules += [f"THOUGHTS: /(?s:.*){_regex_of(tags.reasoning[1])}/{no_call}", "thoughts[lazy]: THOUGHTS"]
        start = "thoughts space answer" if inside_reasoning else f"({opening} thoughts space)? answer"
    if goal.tools:
        assert tags.tool_call is not None
        opening, closing = (token_or_text(tokenizer, tag) for tag in tags.tool_call)
        more = " (space call)*" if goal.is_parallel and not call_list else ""
        body = "call_body"
        if call_list:
            body = '"[" call_body ("," space call_body)* "]"' if goal.is_parallel else '"[" call_body "]"'
        rules += [f"call_rest: space {body} space {closing}", f"call: {opening} call_rest", f"calls: call{more}"]
        rules += json_call_rules(goal.tools, "arguments")
        if opens_call:
            rules += [f"CALL_HEAD: /(?s:.*){opens_call}/", "call_head[lazy]: CALL_HEAD"]
            text_before_calls = f"call_head call_rest{more}"
    rules += answer_rules(goal, text=FREE_TEXT + no_call, text_before_calls=text_before_calls)
    return "\n".join([f"start: {start}", *rules, "space: /[ \\n]{0,2}/"]) + "\n"


def _regex_of(text: str) -> str:
    return "".join(f"\\{char}" if char in ".^$*+?{}[]\\|()/" else char for char in text)


def plain_grammar(recipe: str, goal: Goal) -> str:
    """The grammar of formats without reasoning and tools.

    Raises:
        InvalidRequest: the goal has tools.
    """
    if goal.tools:
        raise InvalidRequest("tools", [tool.name for tool in goal.tools], f"none: the {recipe} format has no tools")
    return "\n".join(["start: answer", *answer_rules(goal)]) + "\n"
