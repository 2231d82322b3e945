"""A paste into a terminal is one message, with GNU readline and without."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
if sys.argv[1] == "plain":
    sys.modules["readline"] = None
from serve.commands.message_reader import MessageReader
reader = MessageReader()
while True:
    try:
        print("GOT", repr(reader.read()), flush=True)
    except EOFError:
        print("END", flush=True)
        break
"""
PASTE = "def f(x):\r\r    return x\rprint(f(1))"


class Terminal:
    """A program that talks to a terminal, and what it has written."""

    def __init__(self, kind: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind],
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm"},
            stdin=slave,
            stdout=slave,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self._master], [], [], 0.1)[0]:
                self.text += os.read(self._master, 4096).decode()

    def type(self, text: str) -> None:
        self.text = ""
        os.write(self._master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize("kind", ["plain", "readline"])
def test_a_paste_is_one_message(kind: str) -> None:
    has_marks = False
    if kind == "readline":
        readline = pytest.importorskip("readline")
        has_marks = "libedit" not in (readline.__doc__ or "")
    terminal = Terminal(kind)
    try:
        terminal.wait_for("> ")
        terminal.type("one line\r")
        terminal.wait_for("GOT 'one line'")
        terminal.wait_for("> ")
        terminal.type(PASTE + "\r")
        terminal.wait_for(r"GOT 'def f(x):\n\n    return x\nprint(f(1))'")
        terminal.wait_for("> ")
        if has_marks:
            terminal.type(f"\x1b[200~{PASTE}\x1b[201~")
            time.sleep(0.2)
            terminal.type(", and more\r")
            terminal.wait_for(r"GOT 'def f(x):\n\n    return x\nprint(f(1)), and more'")
            terminal.wait_for("> ")
        terminal.type("\x04")
        terminal.wait_for("END")
    finally:
        terminal.close()
