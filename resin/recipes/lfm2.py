"""LFM2 and LFM2.5: ChatML turns with Python-style tool calls; LFM2.5 may reason in `<think>` tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from resin.recipes.call_formats import CALL_FORMATS, write_python_call
from resin.recipes.calls import dump_json, parsed_arguments
from resin.recipes.grammar import Goal, tagged_grammar
from resin.recipes.messages import Message, Role, Tool, separate_results
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, require_tokens, stop_ids
from resin.recipes.tagged import TaggedParser, opens_reasoning

_TAGS = replace(CALL_FORMATS["python"], reasoning=("<think>", "</think>"))


class Lfm2Recipe:
    """Tag tokens around the tool list and results are used where the vocabulary has them (LFM2, not LFM2.5)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = ("<|startoftext|>", "<|im_start|>", "<|im_end|>")
        self._bos, self._start, self._end = require_tokens(tokenizer, "lfm2", names)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self._tokenizer, "<|im_end|>", "<|endoftext|>")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        **options: Any,
    ) -> list[int]:
        script = Script(self._tokenizer).control(self._bos)
        turns = separate_results(messages)
        system = turns.pop(0).text if turns and turns[0].role in (Role.SYSTEM, Role.DEVELOPER) else ""
        if system or tools:
            self._open(script, "system").text(system)
            if tools:
                offers = ", ".join(dump_json(tool.to_function()["function"]) for tool in tools)
                script.text("\n" if system else "", "List of tools: ")
                self._in_tags(script, "tool_list", f"[{offers}]")
            self._close(script)
        for turn in turns:
            role = Role.SYSTEM if turn.role is Role.DEVELOPER else turn.role
            self._open(script, role.value)
            if turn.role is Role.TOOL:
                for result in turn.tool_results:
                    self._in_tags(script, "tool_response", result.text)
            elif turn.tool_calls:
                calls = ", ".join(
                    write_python_call(call.name, parsed_arguments(call.arguments)) for call in turn.tool_calls
                )
                self._in_tags(script, "tool_call", f"[{calls}]").text(turn.text)
            else:
                script.text(turn.text)
            self._close(script)
        if add_generation_prompt:
            self._open(script, "assistant").text(answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        # Calls are asked for as a JSON list, which these models know besides their Python syntax.
        inside = opens_reasoning(self._tokenizer, _TAGS, prompt_ids)
        return tagged_grammar(self._tokenizer, _TAGS, goal, inside_reasoning=inside, call_list=True)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        inside = opens_reasoning(self._tokenizer, _TAGS, prompt_ids)
        return TaggedParser(self._tokenizer, _TAGS, prompt_ids, starts_in_reasoning=inside)

    def _open(self, script: Script, role: str) -> Script:
        return script.control(self._start).text(role, "\n")

    def _close(self, script: Script) -> None:
        script.control(self._end).text("\n")

    def _in_tags(self, script: Script, tag: str, text: str) -> Script:
        opening, closing = (self._tokenizer.token_to_id(f"<|{tag}_{side}|>") for side in ("start", "end"))
        if opening is None or closing is None:
            return script.text(text)
        return script.control(opening).text(text).control(closing)
