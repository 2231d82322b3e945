"""The benchmark of the server's cost, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving import main
from bench.serving_client import read_parts


def event(text: str) -> bytes:
    return b"25\r\ndata: " + json.dumps({"id": "x", "choices": [{"delta": {"content": text}}]}).encode() + b"\n\n\r\n"


def test_tokens_get_the_time_of_the_part_that_completes_their_event() -> None:
    first, second = event("1 2 "), event("5 ")
    parts = [(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + first[:20]), (2.0, first[20:] + second), (3.0, b"data: [DONE]\n\n")]
    arrivals, events = read_parts(parts, 3)
    assert arrivals == [(1, 2.0), (2, 2.0), (5, 2.0)]
    assert events == 2


@pytest.mark.parametrize("texts", [["1 2 "], ["1 2 ", "3 4 "], ["2 1 ", "3 "], ["1 1 ", "2 "]])
def test_missing_and_misplaced_tokens_are_errors(texts: list[str]) -> None:
    with pytest.raises(RuntimeError, match="expected 3 in order"):
        read_parts([(1.0, b"".join(map(event, texts)))], 3)


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.json"
    main(["--streams", "3", "--tokens", "40", "--step-ms", "2", "--runs", "1", "--output", str(output)])
    report, printed = json.loads(output.read_text()), capsys.readouterr().out
    for name in ("step 2 ms", "step 0 ms"):
        assert f"{name}: engine" in printed
        assert report[name]["tokens_per_event"] >= 1
        assert report[name]["added_latency_p99_ms"] > 0
        assert report[name]["shares"] == [report[name]["tokens_per_s"] / report[name]["engine_tokens_per_s"]]
    assert report["step 2 ms"]["engine_tokens_per_s"] < 3 / 0.002  # no step is faster


def test_memory_is_measured_until_time_is_up(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    arguments = ["--streams", "2", "--tokens", "5", "--step-ms", "1", "--memory-minutes", "0.01"]
    main([*arguments, "--output", str(output)])
    memory = json.loads(output.read_text())["memory"]
    assert memory["minutes"] >= 0.01 and memory["clients"] >= 1
    assert 10 < memory["last_mb"] < 10_000
