"""Qwen3: ChatML with a `<think>` block before the answer and JSON calls in `<tool_call>` tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resin.recipes.calls import dump_json, parsed_arguments
from resin.recipes.grammar import Goal, tagged_grammar
from resin.recipes.messages import Message, Role, Tool, ToolCall, separate_results
from resin.recipes.recipe import Parser, Tokenizer
from resin.recipes.script import Script, atomic_id, require_tokens, stop_ids
from resin.recipes.tagged import TaggedParser, Tags, opens_reasoning

_TAGS = Tags(reasoning=("<think>", "</think>"), tool_call=("<tool_call>", "</tool_call>"))
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_MIDDLE = "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
_TOOLS_TAIL = " XML tags:\n"
_CALL_FORM = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class Qwen3Recipe:
    """Options: `enable_thinking=False` puts an empty think block into the prompt.

    Reasoning of earlier turns is left out, except after the last user turn, where a tool loop may still be open.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = ("<|im_start|>", "<|im_end|>", *_TAGS.all())
        self._ids = dict(zip(names, require_tokens(tokenizer, "qwen3", names), strict=True))
        for name in ("<tool_response>", "</tool_response>"):
            if (token_id := atomic_id(tokenizer, name)) is not None:
                self._ids[name] = token_id

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
        enable_thinking: bool = True,
        **options: Any,
    ) -> list[int]:
        script = Script(self._tokenizer)
        turns = separate_results(messages)
        system = turns.pop(0).text if turns and turns[0].role in (Role.SYSTEM, Role.DEVELOPER) else None
        if system is not None or tools:
            self._open(script, "system").text(system or "", "\n\n" if tools and system is not None else "")
            if tools:
                lines = ("\n" + dump_json(tool.to_function()) for tool in tools)
                script.text(_TOOLS_HEAD, *lines, _TOOLS_MIDDLE)
                script.control(self._ids["<tool_call>"]).control(self._ids["</tool_call>"]).text(_TOOLS_TAIL)
                self._in_tags(script, "tool_call", _CALL_FORM)
            self._close(script)
        users = [index for index, turn in enumerate(turns) if turn.role is Role.USER]
        last_user = users[-1] if users else len(turns) - 1
        for index, turn in enumerate(turns):
            if turn.role is Role.ASSISTANT:
                self._assistant(script, turn, index > last_user, is_last=index == len(turns) - 1)
            elif turn.role is Role.TOOL:
                self._results(script, turn)
            else:
                self._open(script, "system" if turn.role is Role.DEVELOPER else turn.role.value).text(turn.text)
                self._close(script)
        if add_generation_prompt:
            self._open(script, "assistant")
            if not enable_thinking:
                self._in_tags(script, "think", "\n\n").text("\n\n")
            script.text(answer_start)
        return script.ids()

    def write_grammar(self, goal: Goal, prompt_ids: Sequence[int]) -> str:
        inside = opens_reasoning(self._tokenizer, _TAGS, prompt_ids)
        return tagged_grammar(self._tokenizer, _TAGS, goal, inside_reasoning=inside, call_list=False)

    def create_parser(self, prompt_ids: Sequence[int], *, tools: Sequence[Tool] = ()) -> Parser:
        inside = opens_reasoning(self._tokenizer, _TAGS, prompt_ids)
        return TaggedParser(self._tokenizer, _TAGS, prompt_ids, starts_in_reasoning=inside)

    def _open(self, script: Script, role: str) -> Script:
        return script.control(self._ids["<|im_start|>"]).text(role, "\n")

    def _close(self, script: Script) -> None:
        script.control(self._ids["<|im_end|>"]).text("\n")

    def _in_tags(self, script: Script, tag: str, text: str) -> Script:
        """`tag` around the text; plain characters where the vocabulary has no such token."""
        for name, inside in ((f"<{tag}>", text), (f"</{tag}>", "")):
            token_id = self._ids.get(name)
            (script.text(name) if token_id is None else script.control(token_id)).text(inside)
        return script

    def _assistant(self, script: Script, turn: Message, in_tool_loop: bool, *, is_last: bool) -> None:
        self._open(script, "assistant")
        text = turn.text
        if in_tool_loop and (is_last or turn.reasoning):
            reasoning = turn.reasoning.strip("\n")
            self._in_tags(script, "think", f"\n{reasoning}\n").text("\n\n")
            text = text.lstrip("\n")
        script.text(text)
        for index, call in enumerate(turn.tool_calls):
            script.text("\n" if index or text else "")
            self._in_tags(script, "tool_call", _call_body(call))
        self._close(script)

    def _results(self, script: Script, turn: Message) -> None:
        script.control(self._ids["<|im_start|>"]).text("user")
        for result in turn.tool_results:
            script.text("\n")
            self._in_tags(script, "tool_response", f"\n{result.text}\n")
        self._close(script)


def _call_body(call: ToolCall) -> str:
    arguments = parsed_arguments(call.arguments)
    text = arguments if isinstance(arguments, str) else dump_json(arguments)
    return f'\n{{"name": "{call.name}", "arguments": {text}}}\n'
