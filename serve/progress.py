"""A progress bar on standard error; silent where nobody watches."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_REDRAW_S = 0.1
_BAR_CELLS = 24


class ProgressBar:
    """Redraws one line, which names the job from its beginning. Leaving its `with` block takes the line away.

    Where the stream is no terminal, it writes a line only when a job is complete.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._drawn_s = 0.0
        self._started_s = time.monotonic()
        self._has_line = False
        if self._is_terminal:
            self._draw(title)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._clear()

    def update(self, what: str, done: int, total: int | None) -> None:
        """The shape that loading and warming up report in: what is being done, how much is done, of how much."""
        now = time.monotonic()
        is_complete = total is not None and done >= total
        if not self._is_terminal or (not is_complete and now - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = now
        share = min(1.0, done / total) if total else 0.0
        cells = round(share * _BAR_CELLS)
        bar = "#" * cells + "." * (_BAR_CELLS - cells)
        amount = f"{_amount(done)}/{_amount(total)}" if total else _amount(done)
        self._draw(f"{self._title} [{bar}] {amount} {what}")

    def close(self, summary: str = "") -> None:
        """Replaces the bar with a closing line."""
        self._clear()
        seconds = time.monotonic() - self._started_s
        self._stream.write(f"{self._title}: {summary or 'done'} in {seconds:.1f} s\n")
        self._stream.flush()

    def _draw(self, line: str) -> None:
        self._stream.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()
        self._has_line = True

    def _clear(self) -> None:
        if self._has_line:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._has_line = False


def _amount(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if value >= 10 * size:
            return f"{value / size:.0f}{unit}"
    return str(value)
