"""`resin inspect` says which conversation format a model gets, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resin.models.testing import TINY_CONFIGS
from serve.cli import main
from tests.recipes.style import CONTROLS, template
from tests.recipes.tiny_tokenizers import byte_level, write_files


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            template("thinking"),
            "recipe: jinja: the checkpoint's chat template, from which qwen3 differs in a ",
        ),
        ("{% for %}", "recipe: none: chat_template='{% for %}': expected a valid Jinja template"),
        (None, "recipe: qwen3: the checkpoint has no chat template; its model_type is qwen3"),
    ],
)
def test_the_recipe_and_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str | None, line: str
) -> None:
    settings = {"chat_template": source, "eos_token": "<|im_end|>"}
    write_files(
        tmp_path, byte_level(list(CONTROLS["thinking"])), tokenizer_config=settings, config=TINY_CONFIGS["qwen3"]
    )
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    assert line in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "config.json"), "--json"]) == 0
    assert line.removeprefix("recipe: ") in json.loads(capsys.readouterr().out)["recipe"]


def test_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["qwen3"]))
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    assert "recipe: none: " in (out := capsys.readouterr().out) and "has no tokenizer.json" in out
