"""`resin serve` as two processes: one address, one model over both, and an end for both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint
from tests.full.runtime.test_worker import LIMIT_S, ROOT, free_port
from tests.recipes.tiny_tokenizers import sentencepiece

SIZES = "--context-length 128 --max-sequences 4 --decode-buckets 4 --prefill-buckets 32 --compile-cache-bytes 0 --tp 2"
SIZES += " --cache-bytes 10000000"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dict(TINY_CONFIGS["llama"]) | {"vocab_size": 512}
    directory = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", random_checkpoint(config, seed=5))
    sentencepiece("first", ["<s>", "</s>"]).save(str(directory / "tokenizer.json"))
    return directory


def start(model: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serve.cli", "serve", str(model), "--port", "0", *SIZES.split(), *arguments]
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=settings
    )


@pytest.fixture(params=["options", "torchrun"])
def ranks(model: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[str]]]:
    port = free_port()
    started = []
    for rank in range(2):
        if request.param == "options":
            arguments = ["--nodes", "2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{port}"]
            started.append(start(model, {}, *arguments))
        else:
            told = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1}
            started.append(start(model, {name: str(value) for name, value in told.items()}))
    yield started
    for process in started:
        process.kill()
        process.communicate()


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if " is ready at " in line).split()[-1]


def complete(url: str) -> str:
    body = json.dumps({"prompt": "hello the world", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_two_processes_serve_and_end_together(ranks: list[subprocess.Popen[str]]) -> None:
    url = address_of(ranks[0])
    assert complete(url) == complete(url)
    ranks[0].send_signal(signal.SIGTERM)
    for rank in ranks:
        rank.communicate(timeout=LIMIT_S)
        assert rank.returncode == 0


@pytest.mark.parametrize("ranks", ["options"], indirect=True)
def test_a_worker_that_is_killed_while_nobody_asks_closes_the_listener(ranks: list[subprocess.Popen[str]]) -> None:
    address_of(ranks[0])
    ranks[1].kill()
    _, log = ranks[0].communicate(timeout=LIMIT_S)
    assert ranks[0].returncode == 1
    assert log.splitlines()[-1] == "resin: the server stopped: rank 1 has ended"
