"""Mistakes on the command line of any benchmark: one line, status 2, and before the work."""

from __future__ import annotations

import gzip
import importlib.util
import json
import socket
from pathlib import Path

import pytest

from bench import cpu_compare, sweep
from bench.__main__ import COMMANDS, main
from resin.runtime import ModelRunner
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

TRACE = json.dumps({"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0]}) + "\n"
SHAPE = ["--shape", "smollm2-135m", "--dummy"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "build_setup", lambda *args: pytest.fail("the work began"))


def one_line(capsys: pytest.CaptureFixture[str], command: str) -> str:
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench {command}: ")
    return line


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_an_address_without_a_server(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = nobody()
    assert main(["serve", url, "--trace", str(trace)]) == 2
    assert f"url='{url}': expected a server that lists its models" in one_line(capsys, "serve")
    assert main(["check-server", url]) == 2
    assert f"url='{url}'" in one_line(capsys, "check-server")


def test_a_server_of_another_kind(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(ScriptedRunner()) as server:
        url = f"{server.url}/page"
        assert main(["serve", url, "--trace", str(trace)]) == 2
    assert "404" in one_line(capsys, "serve")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.jsonl", b"{oops\n"),
        ("t.jsonl", b'{"timestamp": 0}\n'),
        ("t.jsonl", b"[1]\n"),
        ("t.jsonl.gz", b"no gzip at all"),
        ("t.jsonl.gz", gzip.compress(mtime=0, data=TRACE.encode() * 99)[:40]),
        ("t.csv", b"a,b\n1,2\n"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n"),
        ("t.csv", b"\xff\xfe"),
    ],
)
def test_a_trace_that_is_none(name: str, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    for command in (["simulate", str(path)], ["serve", nobody(), "--trace", str(path)]):
        assert main(command) == 2
        assert "trace=" in one_line(capsys, command[0])


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "http://x", "--trace", "missing.jsonl"],
        ["simulate", "missing.jsonl"],
        ["replay", "missing.plans"],
        ["plot", "missing.jsonl"],
        ["check-server", "http://x", "--eval-file", "missing.jsonl"],
        ["cpu_compare", "--gguf", "missing.gguf"],
        ["sweep", *SHAPE, "--rounds", "0"],
        ["sweep", *SHAPE, "--batch-sizes", "1,0"],
        ["sweep", *SHAPE, "--batch-sizes", "many"],
        ["sweep", *SHAPE, "--burst-s", "nan"],
        ["coldstart", *SHAPE[:2], "--runs", "0"],
        ["scheduler", "--steps", "0"],
        ["serving", "--streams", "0"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_refused_by_name(
    arguments: list[str], no_work: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: argument" in last and (arguments[-2] in last or arguments[1] in last)


def test_an_output_that_cannot_be_written(
    tmp_path: Path, trace: Path, no_work: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    starts = {
        "sweep": SHAPE,
        "coldstart": SHAPE[:2],
        "kernels": [],
        "serve": ["http://x", "--trace", str(trace)],
        "serving": [],
        "check-server": ["http://x"],
        "cpu_compare": [],
    }
    for command, start in starts.items():
        for place in (tmp_path, tmp_path / "file" / "out.json"):
            with pytest.raises(SystemExit):
                main([command, *start, "--output", str(place)])
            assert "error: argument --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["sweep", *SHAPE, "--plot", "--output", "{}/rows.jsonl"], "matplotlib", "plot"),
        (["plot", "{}/rows.jsonl"], "matplotlib", "plot"),
        (["cloc"], "pygount", "dev"),
    ],
    ids=["sweep", "plot", "cloc"],
)
def test_a_missing_package_is_named_before_the_work(
    arguments: list[str],
    module: str,
    extra: str,
    no_work: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    (tmp_path / "rows.jsonl").write_text("")
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    assert f"{module} is not installed: pip install 'resin[{extra}]'" in one_line(capsys, arguments[0])


def test_the_comparison_names_what_the_other_side_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_compare, "Worker", lambda *args: pytest.fail("it began"))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho transformers torch >&2\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "model.gguf").write_bytes(b"")
    assert main(["cpu_compare", "--gguf", str(tmp_path / "model.gguf"), "--reference-python", str(python)]) == 2
    assert "python lacks transformers torch" in one_line(capsys, "cpu_compare")


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: 300_000_000)
    monkeypatch.setattr(ModelRunner, "compile", lambda *args: pytest.fail("compiled"))
    assert main(["sweep", *SHAPE, "--context-lengths", "64", "--batch-sizes", "1"]) == 2
    assert "model='538.1 MB': expected one that fits the device's memory (weights" in one_line(capsys, "sweep")


def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        if command != "cloc":
            with pytest.raises(SystemExit) as caught:
                main([command, "--help"])
            assert caught.value.code == 0
            assert "usage: python -m bench" in capsys.readouterr().out
