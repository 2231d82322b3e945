"""ChatML, as SmolLM2 speaks it: `<|im_start|>role`, newline, text, `<|im_end|>`, newline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resin.recipes.grammar import Goal, plain_grammar
from resin.recipes.messages import Message, Role, Tool
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, reject_tools, require_tokens, stop_ids
from resin.recipes.tagged import TaggedParser, Tags

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatMLRecipe:
    """Turns of text; no tools and no reasoning.

    Args:
        default_system: the system turn of conversations that bring none; "" for none.
    """

    def __init__(self, tokenizer: Tokenizer, *, default_system: str = "") -> None:
        self._tokenizer = tokenizer
        self._start, self._end = require_tokens(tokenizer, "chatml", ("<|im_start|>", "<|im_end|>"))
        self._default_system = default_system

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
        reject_tools("chatml", messages, tools)
        script = Script(self._tokenizer)
        if self._default_system and (not messages or messages[0].role not in (Role.SYSTEM, Role.DEVELOPER)):
            self._turn(script, "system", self._default_system)
        for message in messages:
            role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
            self._turn(script, role.value, message.text)
        if add_generation_prompt:
            script.control(self._start).text("assistant\n", answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        return plain_grammar("chatml", goal)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        return TaggedParser(self._tokenizer, Tags(), prompt_ids)

    def _turn(self, script: Script, role: str, text: str) -> None:
        script.control(self._start).text(role, "\n", text).control(self._end).text("\n")
