"""Any model's own chat template, and the parser for what it teaches the model to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from resin.plan.errors import InvalidRequest
from resin.recipes.call_formats import BARE_JSON, HARMONY, LISTS, write_calls
from resin.recipes.grammar import Goal, tagged_grammar
from resin.recipes.harmony import HarmonyRecipe
from resin.recipes.llama3 import Llama3Recipe
from resin.recipes.messages import Message, Tool
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import stop_ids
from resin.recipes.tagged import TaggedParser, opens_reasoning
from resin.recipes.template import ChatTemplate, Marks
from resin.recipes.template_traits import probe_template

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class JinjaRecipe:
    """Renders with the tokenizer's `chat_template`, or its `tool_template` where tools are on offer.

    Attributes:
        traits: what the template does with tools, calls and reasoning.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InvalidRequest: there is no template, or it is not valid Jinja."""
        if not tokenizer.chat_template:
            raise InvalidRequest("recipe", "jinja", "a tokenizer with a chat template")
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer.chat_template)
        self._tool_template = ChatTemplate(tokenizer.tool_template) if tokenizer.tool_template else self._template
        self._marks = Marks(tokenizer.controls)
        sources = [source for source in (tokenizer.chat_template, tokenizer.tool_template) if source]
        self.traits = probe_template(self._render, sources, tokenizer.controls, self._marks.pattern)
        self._native = _native_recipe(self.traits.call_format, tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        if self._native is not None:
            return self._native.stop_token_ids
        return stop_ids(self._tokenizer, *self.traits.ends)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        **options: Any,
    ) -> list[int]:
        self._check_tools(messages, tools)
        marks = self._marks
        turns = self.traits.turns.spell(messages)
        for turn in turns:
            calls = turn.pop("tool_calls") if self.traits.writes_calls and "tool_calls" in turn else []
            turn |= {key: marks.mark(value) for key, value in turn.items() if key != "role"}
            if calls:
                functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                written = write_calls(self.traits.call_format, functions, marks.mark)
                turn["content"] = (turn.get("content") or "") + written
        offers = [marks.mark(tool.to_function()) for tool in tools]
        named = {name: marks.mark(value) for name, value in options.items()}
        text = self._render(turns, offers, add_generation_prompt, named)
        if answer_start:
            text += (self._native.answer_opening if self._native is not None else "") + marks.mark(answer_start)
        return self._tokenizer.encode_parts(marks.split(text))

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        if self._native is not None:
            return self._native.write_grammar(goal, prompt_ids)
        traits = self.traits
        if goal.tools and traits.tags.tool_call is None:
            names = [tool.name for tool in goal.tools]
            raise InvalidRequest(
                "tools", names, f"a chat template with calls that can be read: here {traits.describe()}"
            )
        inside = opens_reasoning(self._tokenizer, traits.tags, prompt_ids)
        call_list = traits.call_format in LISTS
        return tagged_grammar(self._tokenizer, traits.tags, goal, inside_reasoning=inside, call_list=call_list)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        if self._native is not None:
            return self._native.create_parser(prompt_ids, tools=tools)
        tags = self.traits.tags
        inside = opens_reasoning(self._tokenizer, tags, prompt_ids)
        return TaggedParser(self._tokenizer, tags, prompt_ids, tools=tools, starts_in_reasoning=inside)

    def _render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        add_generation_prompt: bool,
        options: Mapping[str, Any] = _NO_OPTIONS,
    ) -> str:
        template = self._tool_template if tools else self._template
        values = {**self._tokenizer.named_tokens, **options}
        current_date = str(values.pop("current_date", ""))
        values |= {"tools": tools or None, "add_generation_prompt": add_generation_prompt}
        return template.render(turns, values, current_date=current_date)

    def _check_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """A template that leaves tools, calls or results out would have the model answer to something else."""
        traits = self.traits
        if tools and not traits.shows_tools:
            raise InvalidRequest("tools", [tool.name for tool in tools], "none: this chat template shows no tools")
        for index, message in enumerate(messages):
            has_lost_calls = message.tool_calls and not (traits.shows_calls or traits.writes_calls)
            if has_lost_calls or (message.tool_results and not traits.shows_results):
                raise InvalidRequest(
                    f"messages[{index}]", message.role.value, "text: this chat template shows no calls or results"
                )


def _native_recipe(call_format: str, tokenizer: Tokenizer) -> HarmonyRecipe | Llama3Recipe | None:
    """The recipe that reads answers which no pair of tags describes."""
    with suppress(InvalidRequest):  # another vocabulary: its calls come out as text
        if call_format == HARMONY:
            return HarmonyRecipe(tokenizer)
        if call_format == BARE_JSON:
            return Llama3Recipe(tokenizer)
    return None
