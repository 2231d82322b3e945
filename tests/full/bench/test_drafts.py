"""The benchmark of drafts: the same tokens twice, fewer steps where a text repeats itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import drafts
from bench.drafts import PROMPTS, TokensDiffer, main


def test_texts_with_and_without_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    assert main(["--draft-tokens", "3", "--tokens", "24", "--rounds", "1", "--output", str(output)]) == 0
    found = {row["text"]: row for row in json.loads(output.read_text(encoding="utf-8"))}
    assert list(found) == list(PROMPTS)
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(PROMPTS)
    assert all(row["plain_tokens_per_s"] > 0 and row["tokens_per_step"] >= 1 for row in found.values())


def test_another_token_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([drafts._Answer([1, 2], 1.0, 1), drafts._Answer([1, 3], 1.0, 1)])
    monkeypatch.setattr(drafts, "_answer", lambda *args: next(answers))

    counts = SimpleNamespace(tried=np.zeros(3), agreed=np.zeros(3))
    engine = SimpleNamespace(scheduler=SimpleNamespace(drafts=counts))
    with pytest.raises(TokensDiffer, match="token 1 is 3, without drafts 2"):
        drafts._measure("free text", [1], engine, engine, 2, 1)  # type: ignore[arg-type]
