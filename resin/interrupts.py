"""Ctrl-C at a moment that suits: noted while something runs that must not be cut, and raised after it."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself takes 40 us a call to look for a handler's enum
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Uninterrupted:
    """A context in which the first Ctrl-C is noted, and raised as KeyboardInterrupt at its end; a second is not noted.

    It does so in the main thread and in place of Python's own handler alone: a program that has set its own decides
    for itself, and within another such context the outer one does. Reusable, not reentrant.

    Args:
        on_broken: called with what cut the context short after all, a KeyboardInterrupt or its like.

    Attributes:
        is_requested: a Ctrl-C has been noted; reset it to take no further notice.
    """

    def __init__(self, on_broken: Callable[[BaseException], object] | None = None) -> None:
        self.is_requested = False
        self._on_broken = on_broken
        self._holds = False

    def __enter__(self) -> Uninterrupted:
        is_default = _signal.getsignal(_signal.SIGINT) is signal.default_int_handler
        if is_default and threading.current_thread() is threading.main_thread():
            self._holds = True
            _signal.signal(_signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception) and self._on_broken is not None:
            self._on_broken(error)
        if not self._holds:
            return
        _signal.signal(_signal.SIGINT, signal.default_int_handler)
        self._holds = False
        if self.is_requested:
            self.is_requested = False
            raise KeyboardInterrupt from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            signal.default_int_handler(number, frame)
        self.is_requested = True
