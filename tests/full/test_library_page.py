"""docs/library.md runs as printed, block after block, and does what it says."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin.models.registry import open_checkpoint
from resin.models.testing import TINY_CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's blocks define; the requests of the first and the last engine under names of their own."""
    names: dict[str, Any] = {"directory": tmp_path_factory.mktemp("library")}
    with contextlib.chdir(names["directory"]):
        for number, block in enumerate(BLOCKS):
            exec(compile(block, str(PAGE), "exec"), names)
            names[f"request {number}"] = names.get("request")
    return names


def test_a_model_without_a_tokenizer_runs_from_token_ids(names: dict[str, Any]) -> None:
    assert names["runner"].tokenizer is None
    assert len(names["request 1"].take_result()) == 8


def test_coroutines_get_the_same_tokens(names: dict[str, Any]) -> None:
    assert names["answers"][0] == names["request 1"].take_result()
    assert [len(answer) for answer in names["answers"]] == [8] * 6


def test_training_learns_and_its_checkpoint_serves(names: dict[str, Any]) -> None:
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["request"].take_result() == names["lesson"][3:].tolist()
    trained, before = (open_checkpoint(names["directory"] / name) for name in ("trained", "tiny"))
    assert trained.tensors == before.tensors and trained.config == before.config == TINY_CONFIGS["llama"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not np.array_equal(trained.read(name), before.read(name))
    trained.close()
    before.close()
