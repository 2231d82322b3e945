"""Gemma 3: `<start_of_turn>role`, newline, text, `<end_of_turn>`, newline; no system role, no tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resin.plan.errors import InvalidRequest
from resin.recipes.grammar import Goal, plain_grammar
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, reject_tools, require_tokens, stop_ids
from resin.recipes.tagged import TaggedParser, Tags


class GemmaRecipe:
    """The system text goes in front of the first user turn; every turn's text is stripped."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = ("<bos>", "<start_of_turn>", "<end_of_turn>")
        self._bos, self._start, self._end = require_tokens(tokenizer, "gemma", names)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self._tokenizer, "<end_of_turn>", "<eos>")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        **options: Any,
    ) -> list[int]:
        reject_tools("gemma", messages, tools)
        turns = list(messages)
        prefix = ""
        if turns and turns[0].role in (Role.SYSTEM, Role.DEVELOPER):
            prefix = turns.pop(0).text + "\n\n"
        script = Script(self._tokenizer).control(self._bos)
        for index, turn in enumerate(turns):
            if turn.role in (Role.SYSTEM, Role.DEVELOPER):
                raise InvalidRequest("messages", turn.role.value, "a system message only at the start (gemma format)")
            role = "model" if turn.role is Role.ASSISTANT else "user"
            text = (prefix if index == 0 else "") + turn.text.strip()
            script.control(self._start).text(role, "\n", text).control(self._end).text("\n")
        if prefix and not turns:
            script.control(self._start).text("user\n", prefix.strip()).control(self._end).text("\n")
        if add_generation_prompt:
            script.control(self._start).text("model\n", answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        return plain_grammar("gemma", goal)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        return TaggedParser(self._tokenizer, Tags(), prompt_ids)
