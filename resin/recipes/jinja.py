"""Any model's own chat template, rendered in a sandbox the way transformers renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser as TemplateParser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from resin.plan.errors import InvalidRequest
from resin.recipes.calls import parsed_arguments, read_json_calls
from resin.recipes.grammar import Goal, tagged_grammar
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import PlainText, Script, atomic_id, stop_ids
from resin.recipes.tagged import TaggedParser, Tags, opens_reasoning

_MARK = "\ufdd0"
"""A code point that Unicode reserves for uses inside a program. It stands after the first character of every control
token that a message spells, so that the rendered text tells those from the template's own; twice, it means itself."""
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


class JinjaRecipe:
    """Renders with the tokenizer's `chat_template`; parses `<think>` and `<tool_call>` where the template has them."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """`template` replaces the tokenizer's own.

        Raises:
            InvalidRequest: there is no template, or it is not valid Jinja.
        """
        source = template or tokenizer.chat_template
        if not source:
            raise InvalidRequest("recipe", "jinja", "a tokenizer with a chat template")
        self._tokenizer = tokenizer
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest("chat_template", source, f"a valid Jinja template ({error})") from error
        used = [token for token in set(_TAG.findall(source)) if atomic_id(tokenizer, token) is not None]
        self._plain = PlainText(tokenizer, used)
        self._tags = Tags(
            reasoning=("<think>", "</think>") if "<think>" in source else None,
            tool_call=("<tool_call>", "</tool_call>") if "<tool_call>" in source else None,
            read_calls=read_json_calls,
        )
        self._ends = [token for token in ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>") if token in source]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self._tokenizer, *self._ends)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        turns = [turn for message in messages for turn in _turns(message)]
        values = {
            "bos_token": self._text_of(self._tokenizer.bos_id),
            "eos_token": self._text_of(next(iter(self._tokenizer.eos_ids), None)),
            **options,
            "messages": self._marked(turns),
            "tools": self._marked([tool.to_function() for tool in tools]) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest(
                "messages", [turn["role"] for turn in turns], f"what the template takes ({error})"
            ) from error
        return self._encode(text)

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        if goal.tools and self._tags.tool_call is None:
            raise InvalidRequest("tools", [tool.name for tool in goal.tools], "a chat template with <tool_call> tags")
        inside = opens_reasoning(self._tokenizer, self._tags, prompt_ids)
        return tagged_grammar(self._tokenizer, self._tags, goal, inside_reasoning=inside, call_list=False)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        inside = opens_reasoning(self._tokenizer, self._tags, prompt_ids)
        return TaggedParser(self._tokenizer, self._tags, prompt_ids, starts_in_reasoning=inside)

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""

    def _marked(self, value: Any) -> Any:
        """The same structure with every string marked."""
        if isinstance(value, str):
            starts = [0, *(start + 1 for start in self._plain.control_starts(value)), len(value)]
            pieces = (value[begin:end] for begin, end in pairwise(starts))
            return _MARK.join(piece.replace(_MARK, _MARK * 2) for piece in pieces)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list) else value

    def _encode(self, text: str) -> list[int]:
        """Ids of rendered text: unmarked control tokens as such, everything else as plain text."""
        script = Script(self._plain)
        pattern = self._plain.control_pattern
        for piece in pattern.split(text) if pattern else [text]:
            token_id = self._tokenizer.token_to_id(piece) if pattern and pattern.fullmatch(piece) else None
            if token_id is not None:
                script.control(token_id)
            else:
                script.text(re.sub(f"{_MARK}({_MARK}?)", r"\1", piece))
        return script.ids()


def _turns(message: Message) -> Iterator[dict[str, Any]]:
    """The message as transformers spells it; each tool result is a turn of its own."""
    for result in message.tool_results:
        yield {"role": "tool", "content": result.text, "tool_call_id": result.call_id, "name": result.name}
    if message.tool_results and not message.text:
        return
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    turn: dict[str, Any] = {"role": role.value, "content": message.text}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    yield turn


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for rendering its body is all there is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: TemplateParser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
