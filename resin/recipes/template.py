"""A checkpoint's chat template: Jinja in a sandbox, rendered the way transformers renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser as TemplateParser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from resin.plan.errors import InvalidRequest
from resin.recipes.script import parse_date

_MARK, _ESCAPE = "\ufdd0", "\ufdd1"
"""Code points that Unicode reserves for uses inside a program. A mark stands after the first character of every control
token that a message spells, and after the beginning of one, so that the rendered text tells those from the template's
own; where a message holds one of the two itself, an escape and a digit stand for it."""


class ChatTemplate:
    """One Jinja source, compiled."""

    def __init__(self, source: str) -> None:
        """Raises InvalidRequest if the source is not valid Jinja."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest("chat_template", _shortened(source), f"a valid Jinja template ({error})") from error

    def render(self, turns: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, current_date: str = "") -> str:
        """The text of a conversation.

        Args:
            turns: messages, as OpenAI's API spells them.
            values: other variables of the template, such as `tools`.
            current_date: an ISO date for templates that ask for it; "" for today's.

        Raises:
            InvalidRequest: the template refuses the conversation, or fails on it.
        """
        given = {"strftime_now": _clock(current_date), **values, "messages": turns}
        try:
            return self._template.render(given)
        except _FAULTS as error:
            roles = [turn["role"] for turn in turns]
            raise InvalidRequest("messages", roles, f"what the template takes ({error})") from error


class Marks:
    """Tells control tokens that a template writes from those that a message spells."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        spelled = "|".join(map(re.escape, sorted(controls, key=lambda text: (-len(text), text)))) or "(?!)"
        self.pattern = re.compile(f"({spelled})")
        self._overlapping = re.compile(f"(?={spelled})")
        self._beginnings = {control[:end] for control in controls for end in range(1, len(control))}
        self._longest = max(map(len, self._beginnings), default=0)

    def mark(self, value: Any) -> Any:
        """The same structure with every string marked."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list) else value

    def split(self, text: str) -> list[str | int]:
        """Parts of a rendered text: unmarked control tokens as ids, everything else as text without marks."""
        return [
            self._controls[piece] if index % 2 else _unmark(piece)
            for index, piece in enumerate(self.pattern.split(text))
        ]

    def _mark_text(self, text: str) -> str:
        text = text.replace(_ESCAPE, _ESCAPE + "1").replace(_MARK, _ESCAPE + "0")
        starts = {match.start() + 1 for match in self._overlapping.finditer(text)}
        # Templates put names and keys into brackets of their own.
        if any(opening + text + closing in self._controls for opening, closing in _BRACKETS):
            starts.add(1)
        # What follows might complete the beginning of a control token at the end.
        end = len(text.rstrip())
        if any(text[end - length : end] in self._beginnings for length in range(1, min(end, self._longest) + 1)):
            starts.add(end)
        return _MARK.join(text[begin:end] for begin, end in pairwise([0, *sorted(starts), len(text)]))


_BRACKETS = (("<", ">"), ("</", ">"), ("[", "]"), ("[/", "]"))


def _unmark(text: str) -> str:
    return text.replace(_MARK, "").replace(_ESCAPE + "0", _MARK).replace(_ESCAPE + "1", _ESCAPE)


def _shortened(source: str) -> str:
    return source if len(source) <= 200 else source[:197] + "..."


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter this escapes nothing for HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    return text.replace(r"\ufdd0", _MARK).replace(r"\ufdd1", _ESCAPE) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(current_date: str) -> Callable[[str], str]:
    """`strftime_now` as templates call it, on a given day."""
    day = parse_date(current_date)
    return lambda form: datetime.combine(day, datetime.now().time()).strftime(form)


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; for rendering its body is all there is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: TemplateParser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
