"""Harmony, the format of gpt-oss: messages with a role, a channel and sometimes a recipient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resin.recipes.grammar import FREE_TEXT, Goal, arguments_schema, json_rule, quote
from resin.recipes.harmony_parser import HarmonyParser
from resin.recipes.messages import Message, Role, Tool, separate_results
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, require_tokens, stop_ids
from resin.recipes.typescript import write_namespace

_NAMES = ("start", "end", "message", "channel", "constrain", "return", "call")
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_TOOL_CHANNEL = "\nCalls to these tools must go to the commentary channel: 'functions'."


class HarmonyRecipe:
    """System and developer messages both become the developer turn; the system turn is the format's own.

    Options: `reasoning_effort` ("low", "medium" or "high"; medium if not given), `current_date` (text of the date
    line; no line without it). Reasoning is replayed only after the last final answer, where a tool loop is open.
    """

    answer_opening = "<|channel|>final<|message|>"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = [f"<|{name}|>" for name in _NAMES]
        self._ids = dict(zip(_NAMES, require_tokens(tokenizer, "gpt_oss", tokens), strict=True))
        end_of_text = tokenizer.token_to_id("<|endoftext|>")
        if end_of_text is not None:
            self._ids["endoftext"] = end_of_text

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_ids(self._tokenizer, "<|return|>", "<|call|>", "<|endoftext|>")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        answer_start: str = "",
        reasoning_effort: str | None = None,
        current_date: str = "",
        **options: Any,
    ) -> list[int]:
        script = Script(self._tokenizer)
        date = f"Current date: {current_date}\n" if current_date else ""
        effort = f"\nReasoning: {reasoning_effort or 'medium'}\n\n"
        self._message(script, "system", _IDENTITY + date + effort + _CHANNELS + (_TOOL_CHANNEL if tools else ""))
        turns = separate_results(messages)
        instructions = turns.pop(0).text if turns and turns[0].role in (Role.SYSTEM, Role.DEVELOPER) else ""
        sections = [f"# Instructions\n\n{instructions}"] if instructions else []
        sections += [f"# Tools\n\n{write_namespace('functions', tools)}"] if tools else []
        if sections:
            self._message(script, "developer", "\n\n".join(sections))
        answered = [index for index, turn in enumerate(turns) if _is_final(turn)]
        names = {call.id: call.name for turn in turns for call in turn.tool_calls}
        for index, turn in enumerate(turns):
            if turn.role is Role.ASSISTANT:
                self._assistant(script, turn, keeps_reasoning=not answered or index > answered[-1])
            elif turn.role is Role.TOOL:
                for result in turn.tool_results:
                    name = result.name or names.get(result.call_id, "unknown")
                    self._message(script, f"functions.{name} to=assistant", result.text, channel="commentary")
            elif turn.role is Role.USER:
                self._message(script, "user", turn.text)
            else:
                self._message(script, "developer", f"# Instructions\n\n{turn.text}")
        if add_generation_prompt:
            script.control(self._ids["start"]).text("assistant")
            if answer_start:
                script.control(self._ids["channel"]).text("final").control(self._ids["message"]).text(answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        """Analysis may come first; then one final message or one call, which ends the turn."""
        start, channel, message, end, constrain = (
            f"<[{self._ids[name]}]>" for name in ("start", "channel", "message", "end", "constrain")
        )
        options = []
        rules = [f'analysis: {channel} "analysis" {message} {FREE_TEXT}? {end} {start} "assistant"']
        for index, tool in enumerate(goal.tools):
            options.append(f"call_{index}")
            recipient = quote(f"commentary to=functions.{tool.name} ")
            rules.append(f'call_{index}: {channel} {recipient} {constrain} "json" {message} arguments_{index}')
            rules.append(f"arguments_{index}: {json_rule(arguments_schema(tool))}")
        if goal.schema is not None:
            options.append("json_answer")
            rules.append(f'json_answer: {channel} "final" {message} schema_text')
            rules.append(f"schema_text: {json_rule(goal.schema)}")
        if goal.allows_text:
            options.append("text")
            rules.append(f'text: {channel} "final" {message} {FREE_TEXT}')
        return "\n".join([f"start: analysis* ({' | '.join(options)})", *rules]) + "\n"

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        return HarmonyParser(self._tokenizer, self._ids, prompt_ids)

    def _assistant(self, script: Script, turn: Message, *, keeps_reasoning: bool) -> None:
        if turn.reasoning and keeps_reasoning:
            self._message(script, "assistant", turn.reasoning, channel="analysis")
        if turn.text or not turn.tool_calls:
            self._message(script, "assistant", turn.text, channel="commentary" if turn.tool_calls else "final")
        for call in turn.tool_calls:
            script.control(self._ids["start"]).text(f"assistant to=functions.{call.name}")
            script.control(self._ids["channel"]).text("commentary ").control(self._ids["constrain"]).text("json")
            script.control(self._ids["message"]).text(call.arguments).control(self._ids["call"])

    def _message(self, script: Script, author: str, text: str, *, channel: str = "") -> None:
        script.control(self._ids["start"]).text(author)
        if channel:
            script.control(self._ids["channel"]).text(channel)
        script.control(self._ids["message"]).text(text).control(self._ids["end"])


def _is_final(turn: Message) -> bool:
    return turn.role is Role.ASSISTANT and bool(turn.text) and not turn.tool_calls
