"""Llama 3: header tokens around the role; a tool call is the whole answer, as bare JSON or after `<|python_tag|>`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from resin.plan.errors import InvalidRequest
from resin.recipes.calls import CallIds, dump_json, parsed_arguments, read_json_calls
from resin.recipes.characters import CharacterStream
from resin.recipes.deltas import Delta, TextDelta, ToolCallDelta
from resin.recipes.grammar import Goal, answer_rules, json_call_rules, plain_grammar
from resin.recipes.messages import Message, Role, Tool, ToolCall, separate_results
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, atomic_id, parse_date, require_tokens, stop_ids

_TOOLS_HEAD = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}.Do not use variables.\n\n"
)
_CUTOFF = "Cutting Knowledge Date: December 2023\n"
_TEXT = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f{](?s:.*))?/"
"""An answer that does not begin like a call, what Python calls white space aside."""


class Llama3Recipe:
    """The format of Llama 3.1 and later. Option: `current_date`, an ISO date for the system turn (default: today).

    Tools are offered in the first user turn. A turn with a call is the call alone; several calls, which the models'
    makers rule out, are separated by semicolons. Results come back as JSON strings in the role `ipython`.
    """

    answer_opening = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
        self._bos, self._start, self._end, self._turn_end = require_tokens(tokenizer, "llama3", names)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self._tokenizer, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        current_date: str = "",
        **options: Any,
    ) -> list[int]:
        script = Script(self._tokenizer).control(self._bos)
        turns = separate_results(messages)
        system = turns.pop(0).text.strip() if turns and turns[0].role in (Role.SYSTEM, Role.DEVELOPER) else ""
        environment = "Environment: ipython\n" if tools else ""
        today = f"Today Date: {parse_date(current_date):%d %b %Y}\n\n"
        self._turn(script, "system", environment + _CUTOFF + today + system)
        if tools and all(turn.role is not Role.USER for turn in turns):
            raise InvalidRequest("messages", [turn.role.value for turn in turns], "a user message, to offer tools in")
        offer = _TOOLS_HEAD + "".join(_indented(tool) for tool in tools) if tools else ""
        for turn in turns:
            if turn.role is Role.TOOL:
                for result in turn.tool_results:
                    self._turn(script, "ipython", dump_json(result.text))
            elif turn.tool_calls:
                self._turn(script, "assistant", "; ".join(map(_call_text, turn.tool_calls)))
            else:
                role = Role.SYSTEM if turn.role is Role.DEVELOPER else turn.role
                self._turn(script, role.value, (offer if role is Role.USER else "") + turn.text.strip())
                offer = "" if role is Role.USER else offer
        if add_generation_prompt:
            self._header(script, "assistant").text(answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        if not goal.tools:
            return plain_grammar("llama3", goal)
        tag_id = atomic_id(self._tokenizer, "<|python_tag|>")
        tag = "" if tag_id is None else f"<[{tag_id}]>"
        more = ' ("; " call_body)*' if goal.is_parallel else ""
        rules = [f"bodies: call_body{more}", f"calls: {tag}? bodies" if tag else "calls: bodies"]
        rules += json_call_rules(goal.tools, "parameters")
        rules += answer_rules(goal, text=_TEXT, text_before_calls=f"text {tag} bodies" if tag else "")
        return "\n".join(["start: answer", *rules]) + "\n"

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        return Llama3Parser(self._tokenizer, prompt_ids, has_tools=bool(tools))

    def _header(self, script: Script, role: str) -> Script:
        return script.control(self._start).text(role).control(self._end).text("\n\n")

    def _turn(self, script: Script, role: str, text: str) -> None:
        self._header(script, role).text(text).control(self._turn_end)


class Llama3Parser:
    """Text, or calls if the answer starts with `{` while tools are on offer, or from `<|python_tag|>` on."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, has_tools: bool) -> None:
        self._characters = CharacterStream(tokenizer)
        self._python_tag = atomic_id(tokenizer, "<|python_tag|>")
        self._call_ids = CallIds(prompt_ids)
        self._body: list[str] = []
        self._is_call = False
        self._is_undecided = has_tools

    def push(self, token_ids: Iterable[int]) -> list[Delta]:
        deltas: list[Delta] = []
        for token_id in token_ids:
            if token_id == self._python_tag:
                deltas += self._read(self._characters.flush())
                deltas += self._release()
                self._is_call, self._is_undecided = True, False
            else:
                deltas += self._read(self._characters.push(token_id))
        return deltas

    def finish(self) -> list[Delta]:
        deltas = self._read(self._characters.flush())
        body = "".join(self._body)
        calls = read_json_calls(body) if self._is_call else None
        if calls is None:
            return deltas + self._release()
        self._body.clear()
        return deltas + [
            ToolCallDelta(index, self._call_ids.id_of(index), call.name, call.arguments)
            for index, call in enumerate(calls)
        ]

    def _read(self, text: str) -> list[Delta]:
        if not text:
            return []
        if not self._is_call and not self._is_undecided:
            return [TextDelta(text)]
        self._body.append(text)
        start = "".join(self._body).lstrip() if self._is_undecided else ""
        if not start:
            return []
        self._is_undecided = False
        self._is_call = start.startswith("{")
        return [] if self._is_call else self._release()

    def _release(self) -> list[Delta]:
        """What was held, as text: flagged if it looked like a call."""
        body = "".join(self._body)
        self._body.clear()
        return [TextDelta(body, is_incomplete=self._is_call)] if body else []


def _indented(tool: Tool) -> str:
    return json.dumps(tool.to_function(), indent=4, ensure_ascii=False) + "\n\n"


def _call_text(call: ToolCall) -> str:
    arguments = parsed_arguments(call.arguments)
    text = arguments if isinstance(arguments, str) else dump_json(arguments)
    return f'{{"name": "{call.name}", "parameters": {text}}}'
