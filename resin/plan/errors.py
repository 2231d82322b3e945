"""Exceptions that users of the library can catch by one base class."""


class ResinError(Exception):
    """Base class of every error that Resin raises on purpose."""


def shorten(value: object) -> str:
    """A value as messages show it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


class InvalidRequest(ResinError, ValueError):
    """A request or setting that can never work.

    Attributes:
        field: name of the offending field, as the caller spells it.
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}={shorten(value)}: expected {expected}")
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from `args`, which hold the message alone; the value may be anything.
        return _rebuild, (type(self), self.args, self.__dict__)


class PlanRejected(ResinError):
    """Raised by `Runner.accept` to refuse a plan before anything ran: the step may be retried."""


def _rebuild(kind: type[InvalidRequest], args: tuple[object, ...], state: dict[str, object]) -> InvalidRequest:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
