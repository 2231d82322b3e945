"""Ctrl-C in `resin chat`, typed into a terminal: it ends what loads and stops what answers, at any moment."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
SILENCE_S = 0.2  # after which a prompt is the last that comes

CHAT = """
import sys, time
from typing import Any
sys.argv = ["resin", "chat"]
from serve.cli import main

def patch():
    from resin import Engine
    from resin.models.sampling_defaults import SamplingDefaults
    from resin.models.workers import worker_pool
    from resin.recipes import get_native_recipe
    from serve.commands import chat
    from serve.loaded_model import LoadedModel
    from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner

    def load(args: Any) -> LoadedModel:
        with worker_pool(2, "compile") as pool:
            print("loading", flush=True)
            pool.submit(time.sleep, LOADING_S).result()
        runner = ScriptedRunner(default="abcdefghij" * 300, step_s=0.002)
        recipe = get_native_recipe("qwen3", TOKENIZER)
        return LoadedModel("scripted", Engine(runner), TOKENIZER, recipe, SamplingDefaults())

    chat.load_model = load

LOADING_S = LOADING
patch()
sys.exit(main())
"""


# A terminal belongs to the session that opens it; Popen can start one, but opens nothing in it.
IN_ITS_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str, directory: Path = ROOT) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_ITS_TERMINAL, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def press(self) -> None:
        self.type("\x03")

    def read(self, wait_s: float) -> bool:
        """Takes what the program writes next; False if it has ended or says nothing for that long."""
        if not select.select([self._master], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # what Linux says when the other side is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, pattern: str) -> None:
        """Reads until the pattern is there, and forgets what came up to its end."""
        until = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.text)):
            assert self.read(max(until - time.monotonic(), 0)), f"no {pattern!r} in {self.text!r}"
        self.text = self.text[found.end() :]

    def wait_for_prompt(self) -> None:
        """Reads until the program asks for a message and says nothing more: an interrupt may bring a second prompt."""
        self.wait_for("> $")
        while self.read(SILENCE_S):
            self.wait_for("> $")

    def wait_for_end(self) -> int:
        """The exit status, a signal counted as a shell does."""
        while self.read(PATIENCE_S):
            pass
        code = self._process.wait(PATIENCE_S)
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


@contextlib.contextmanager
def chat(*, loading_s: float = 0.0, make: Path | None = None) -> Iterator[Terminal]:
    program = CHAT.replace("LOADING\n", f"{loading_s}\n")
    if make is not None:
        (make / "chat.py").write_text(program)
        (make / "Makefile").write_text(f"chat:\n\t{sys.executable} chat.py\n")
        found = shutil.which("make")
        assert found is not None
        terminal = Terminal(found, "-s", "chat", directory=make)
    else:
        terminal = Terminal(sys.executable, "-c", program)
    try:
        yield terminal
    finally:
        terminal.close()


def interrupt_answers(terminal: Terminal, times: int) -> None:
    """Stops answers at any moment, now and then before one has begun or after it has ended."""
    rng = random.Random(times)
    for _ in range(times):
        terminal.type("go\n")
        terminal.wait_for("go")
        time.sleep(rng.choice([0, 0.01, rng.uniform(0, 0.3)]))
        terminal.press()
        terminal.wait_for(r"\^C")
        terminal.wait_for_prompt()
    terminal.type("go\n")
    terminal.wait_for("abcdefghij" * 3)
    terminal.press()
    terminal.wait_for(r"\[\d+ tokens")
    terminal.wait_for_prompt()


def test_ctrl_c_stops_answers_and_the_chat_goes_on() -> None:
    with chat() as terminal:
        terminal.wait_for_prompt()
        interrupt_answers(terminal, 12)
        terminal.press()
        terminal.wait_for_prompt()
        terminal.type("/exit\n")
        assert terminal.wait_for_end() == 0, terminal.text
        assert "Traceback" not in terminal.text


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_same_under_make(tmp_path: Path) -> None:
    with chat(make=tmp_path) as terminal:
        terminal.wait_for_prompt()
        interrupt_answers(terminal, 4)
        terminal.type("/exit\n")
        terminal.wait_for_end()  # make remembers that it was interrupted
        assert "Traceback" not in terminal.text


def test_ctrl_c_ends_loading_without_waiting_for_what_compiles() -> None:
    with chat(loading_s=300) as terminal:
        terminal.wait_for("loading")
        started = time.monotonic()
        terminal.press()
        assert terminal.wait_for_end() == 130
        assert time.monotonic() - started < 10
        assert terminal.text.replace("\r", "").replace("\n", "") == "^C"


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3])
def test_ctrl_c_ends_importing(after_s: float) -> None:
    program = """
import sys, serve.cli
sys.argv, run = ["resin", "chat", "/nowhere"], serve.cli._run
serve.cli._run = lambda arguments: print("up", flush=True) or run(arguments)
serve.cli.main()
"""
    with contextlib.closing(Terminal(sys.executable, "-c", program)) as terminal:
        terminal.wait_for("up")
        time.sleep(after_s)
        terminal.press()
        assert terminal.wait_for_end() in (0, 130)  # 0: it had ended before
        assert "Traceback" not in terminal.text


def test_the_command_line_comes_up_without_what_it_may_not_need() -> None:
    code = "import sys, serve.cli; print(sorted({'numpy', 'aiohttp', 'jax', 'tokenizers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
