"""The server as a process: signals, exit status and the last log line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

SERVER = """
import logging, sys
from resin import Engine
from resin.recipes import get_native_recipe
from serve import HttpServer, ServerConfig
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
runner = ScriptedRunner(default="abcdefghij" * 20, step_s=0.005)
recipe = get_native_recipe("qwen3", TOKENIZER)
server = HttpServer(Engine(runner), recipe=recipe, model="m", config=ServerConfig(port=0))
server.serve(on_ready=lambda: print(server.url, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_cleanly(number: int) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            first = response.readline()
            process.send_signal(number)
            rest = response.read()
        assert first.startswith(b"data: ") and rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"stop"' in rest
        started = time.monotonic()
        _, log = process.communicate(timeout=10)
        assert time.monotonic() - started < 5
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    lines = log.splitlines()
    assert lines[-1] == "resin.serve stopped"
    access = [json.loads(line.removeprefix("resin.access ")) for line in lines if line.startswith("resin.access")]
    assert [(line["method"], line["path"], line["status"]) for line in access] == [
        ("POST", "/v1/chat/completions", 200)
    ]
