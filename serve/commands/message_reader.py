"""Messages from standard input: one a line, but what is pasted into a terminal is one message however many lines."""

from __future__ import annotations

import contextlib
import select
import sys

# A terminal hands a paste over at once; between two lines that are typed more time passes.
_PASTE_PAUSE_S = 0.05


class MessageReader:
    """Asks for messages, with line editing and history where the platform has them.

    GNU readline takes a whole paste into the line that is being edited, where the terminal marks its ends. Elsewhere
    the lines of a paste are those that come without a pause.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str:
        """The next message, stripped.

        Raises:
            EOFError: there is none.
        """
        if not self.is_interactive:
            return input().strip()
        lines = [input("> ")]
        with contextlib.suppress(EOFError):
            while select.select([sys.stdin], [], [], _PASTE_PAUSE_S)[0]:
                lines.append(input("  "))
        return "\n".join(lines).strip()
