"""The README's code runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def run_block(marker: str) -> dict[str, Any]:
    """Runs the one block that holds `marker`; returns its names."""
    [block] = [block for block in BLOCKS if marker in block]
    names: dict[str, Any] = {}
    exec(compile(block, str(README), "exec"), names)
    return names


def test_custom_runner_generates() -> None:
    from resin import Engine, SamplingParams

    names = run_block("class ZeroRunner")
    with Engine(names["ZeroRunner"](), context_length=64) as engine:
        requests = [
            engine.submit([5, 6, 7], sampling_params=SamplingParams(max_output_tokens=4)),
            engine.submit([8], sampling_params=SamplingParams(max_output_tokens=2)),
        ]
        while engine.has_work():
            engine.step()
        assert [request.take_result() for request in requests] == [[0] * 4, [0] * 2]


def test_minimal_use_prints_events_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_block('load_runner("smollm2-135m")')
    generated = names["request"].output_ids
    assert 1 <= len(generated) <= 8
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert names["runner"].tokenizer.decode(generated) in "\n".join(lines)
