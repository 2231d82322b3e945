"""The examples of clients in the documentation run as printed, but for the address and the model's name."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serve import HttpServer
from tests.serve.running import running_server
from tests.serve.scripted_runner import ScriptedRunner

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
ANSWER = "The capital of France is Paris."
EXAMPLES = [
    (page, kind, code)
    for page in ("README.md", "docs/serving.md")
    for kind, code in re.findall(r"```(sh|python)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    if ADDRESS in code
]


@pytest.fixture(scope="module")
def server() -> HttpServer:
    with running_server(ScriptedRunner(default=ANSWER)) as server:
        yield server


def test_both_pages_have_examples() -> None:
    assert {(page, kind) for page, kind, _ in EXAMPLES} >= {
        ("README.md", "sh"),
        ("README.md", "python"),
        ("docs/serving.md", "sh"),
        ("docs/serving.md", "python"),
    }


@pytest.mark.parametrize(("page", "kind", "code"), EXAMPLES)
def test_an_example_gets_the_answer(page: str, kind: str, code: str, server: HttpServer) -> None:
    code = code.replace(ADDRESS, server.url).replace("smollm2-135m", "scripted")
    if kind == "sh":
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        output = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, check=True, timeout=30).stdout
        pieces = re.findall(r'"(?:content|text)":\s*"([^"]*)"', output)
        assert ANSWER.startswith("".join(pieces)) and len("".join(pieces)) >= 8
        return
    pytest.importorskip(re.findall(r"^from (\w+) import", code, re.MULTILINE)[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {})
    assert printed.getvalue().strip() == ANSWER
