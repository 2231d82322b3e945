"""Any model's own chat template, rendered in a sandbox the way transformers renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
from resin.recipes.script import stop_ids
from resin.recipes.tagged import TaggedParser, Tags, opens_reasoning

_MARK = "\ufdd0"
"""A code point that Unicode reserves for uses inside a program. It stands after the first character of every control
token that a message spells, so that the rendered text tells those from the template's own; twice, it means itself."""


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
        self._marks = _Marks(tokenizer.controls)
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
            **self._tokenizer.named_tokens,
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
        return self._tokenizer.encode_parts(self._marks.split(text))

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        if goal.tools and self._tags.tool_call is None:
            raise InvalidRequest("tools", [tool.name for tool in goal.tools], "a chat template with <tool_call> tags")
        inside = opens_reasoning(self._tokenizer, self._tags, prompt_ids)
        return tagged_grammar(self._tokenizer, self._tags, goal, inside_reasoning=inside, call_list=False)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        inside = opens_reasoning(self._tokenizer, self._tags, prompt_ids)
        return TaggedParser(self._tokenizer, self._tags, prompt_ids, starts_in_reasoning=inside)

    def _marked(self, value: Any) -> Any:
        """The same structure with every string marked."""
        if isinstance(value, str):
            return self._marks.mark(value)
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        return [self._marked(item) for item in value] if isinstance(value, list) else value


class _Marks:
    """Tells control tokens that a template writes from those that a message spells."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        spelled = "|".join(map(re.escape, sorted(controls, key=lambda text: (-len(text), text)))) or "(?!)"
        self._pattern = re.compile(f"({spelled})")
        self._overlapping = re.compile(f"(?={spelled})")

    def mark(self, text: str) -> str:
        starts = [0, *(match.start() + 1 for match in self._overlapping.finditer(text)), len(text)]
        return _MARK.join(text[begin:end].replace(_MARK, _MARK * 2) for begin, end in pairwise(starts))

    def split(self, text: str) -> list[str | int]:
        """Parts of a rendered text: unmarked control tokens as ids, everything else as text without marks."""
        return [
            self._controls[piece] if index % 2 else re.sub(f"{_MARK}({_MARK}?)", r"\1", piece)
            for index, piece in enumerate(self._pattern.split(text))
        ]


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
