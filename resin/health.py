"""Health: whether an engine may be used."""

from __future__ import annotations

from resin.plan import ResinError


class EngineFailed(ResinError):
    """The engine is quarantined, because a step failed after its plan was accepted, or closed. Build a new engine."""


class Health:
    """Usable until it fails or is closed, and not from within a request's own callback.

    Attributes:
        failure: what the engine is quarantined for.
        is_closed: `close` was called.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.is_closed = False
        self._is_planning = False

    @property
    def is_usable(self) -> bool:
        return self.failure is None and not self.is_closed

    def __enter__(self) -> None:
        """While callbacks of requests run, which must not come back to the engine."""
        self._is_planning = True

    def __exit__(self, *_: object) -> None:
        self._is_planning = False

    def refuse_reentry(self) -> None:
        """Raises RuntimeError within the context."""
        if self._is_planning:
            raise RuntimeError("an allowed_tokens callback called the engine that runs it")

    def check(self) -> None:
        """Raises EngineFailed unless the engine is usable."""
        self.refuse_reentry()
        if self.failure is not None:
            raise EngineFailed(f"the engine is quarantined after {self.failure!r}") from self.failure
        if self.is_closed:
            raise EngineFailed("the engine is closed")
