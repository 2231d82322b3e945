"""Prompts of styled chat templates: the text that transformers renders, with the control tokens in their places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resin.plan import InvalidRequest
from resin.recipes.jinja import JinjaRecipe
from tests.recipes.conversations import as_messages
from tests.recipes.make_template_goldens import CONVERSATIONS, GOLDENS, STYLES, is_compared, options_of
from tests.recipes.style import styled_tokenizer

TEXTS = json.loads(GOLDENS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("style", STYLES)
def test_prompts_are_what_transformers_renders(style: str) -> None:
    tokenizer = styled_tokenizer(style)
    recipe = JinjaRecipe(tokenizer)
    assert len(TEXTS[style]) >= 6
    for name, conversation in CONVERSATIONS.items():
        messages, options = as_messages(conversation), {**options_of(conversation), "current_date": "2026-01-02"}
        if not is_compared(recipe, conversation):
            continue
        if name not in TEXTS[style]:
            with pytest.raises(InvalidRequest):
                recipe.render(messages, conversation.tools, **options)
        else:
            assert recipe.render(messages, conversation.tools, **options) == tokenizer.encode(TEXTS[style][name]), name


@pytest.mark.reference
def test_goldens_are_what_transformers_renders_now() -> None:
    pytest.importorskip("transformers")
    # In a process of its own: transformers warns, and warnings are errors here.
    command = [sys.executable, "-m", "tests.recipes.make_template_goldens", "--check"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
