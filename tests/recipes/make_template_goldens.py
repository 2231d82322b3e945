"""Renders the styled chat templates with transformers, for tests that run without it.

python -m tests.recipes.make_template_goldens [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from resin.plan import InvalidRequest
from resin.recipes.jinja import JinjaRecipe
from tests.recipes.conversations import Conversation, all_conversations, as_dicts, as_messages
from tests.recipes.style import CONTROLS, styled_tokenizer, template

GOLDENS = Path(__file__).parent.parent / "data" / "template_goldens.json"
STYLES = [name for name in CONTROLS if name != "hermes-tools"]
CHOSEN = (
    "outer spaces",
    "letters",
    "marks",
    "three turns and system",
    "turns with space",
    "answered",
    "tools and system",
    "result in JSON",
    "two calls",
    "two calls without tools",
    "call after words",
    "no arguments",
    "result and answer",
    "reasoning in a loop",
    "earlier reasoning",
)
CONVERSATIONS = {item.name: item for item in all_conversations() if item.name in CHOSEN}


def options_of(conversation: Conversation) -> dict[str, Any]:
    return {**conversation.options, "add_generation_prompt": not conversation.is_answered}


def is_compared(recipe: JinjaRecipe, conversation: Conversation) -> bool:
    """Calls that a template leaves out are in the prompt here, and not there."""
    return not (recipe.traits.writes_calls and any(role == "call" for role, _ in conversation.turns))


def rendered(style: str, conversation: Conversation) -> str:
    """The text as transformers renders it; dates are those of a fixed day."""
    from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template

    tokenizer = styled_tokenizer(style)
    turns = as_dicts(conversation, JinjaRecipe(tokenizer).traits.turns)
    tools = [tool.to_function() for tool in conversation.tools] or None
    source = tokenizer.tool_template if tools and tokenizer.tool_template else template(style)
    values = {**tokenizer.named_tokens, **options_of(conversation), "strftime_now": lambda form: "2026-01-02"}
    compiled = _compile_jinja_template(source)
    return compiled.render(messages=_alias_reasoning_fields(turns), tools=tools, **values)


def make() -> dict[str, dict[str, str]]:
    """Texts by style and conversation, of what the recipe does not refuse."""
    goldens: dict[str, dict[str, str]] = {}
    for style in STYLES:
        recipe = JinjaRecipe(styled_tokenizer(style))
        goldens[style] = {}
        for name, conversation in CONVERSATIONS.items():
            if not is_compared(recipe, conversation):
                continue
            try:
                recipe.render(as_messages(conversation), conversation.tools, **options_of(conversation))
            except InvalidRequest:
                continue
            goldens[style][name] = rendered(style, conversation)
    return goldens


if __name__ == "__main__":
    made = make()
    if "--check" not in sys.argv:
        GOLDENS.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    elif made != json.loads(GOLDENS.read_text(encoding="utf-8")):
        sys.exit("the goldens are not what transformers renders")
    print(f"{sum(map(len, made.values()))} texts")
