"""Settings of a model, read one by one: each with its type and its range, and none left unread by accident."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from resin.plan import InvalidRequest

Default = TypeVar("Default")
Fault = Callable[[str, object, str], Exception]
"""Makes the error of (setting, value, what was expected)."""

REQUIRED: Final[Any] = object()
LARGEST = 2**31 - 1
MOST_NAMED = 8  # a message that lists more is not read


class ConfigReader(Mapping[str, Any]):
    """A mapping that remembers what was asked of it. Null is the same as absent.

    Args:
        values: settings by name.
        fault: makes the error that a bad setting raises.
        path: how messages call the mapping itself, for example "rope_scaling."; empty for the whole config.
    """

    def __init__(self, values: Mapping[str, Any], *, fault: Fault = InvalidRequest, path: str = "") -> None:
        self._values = values
        self._fault = fault
        self._path = path
        self._read: set[str] = set()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ConfigReader:
        """The reader itself, or a new one over a plain mapping."""
        return values if isinstance(values, ConfigReader) else cls(values)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_values(self, **values: Any) -> ConfigReader:
        """A reader of the same settings with some replaced; what it reads counts as read here too."""
        other = ConfigReader({**self._values, **values}, fault=self._fault, path=self._path)
        other._read = self._read
        return other

    def refuse(self, name: str, value: object, expected: str) -> NoReturn:
        """Raises the error of a setting."""
        raise self._fault(self._path + name, value, expected)

    def find(self, *names: str) -> tuple[str, Any]:
        """The first of several spellings that is there, and its value; else all spellings, and None."""
        found = [(name, value) for name in names if (value := self.get(name)) is not None]
        return found[0] if found else (" or ".join(names), None)

    def integer(self, *names: str, default: Default = REQUIRED, low: int = 1, high: int = LARGEST) -> int | Default:
        """A whole number within its range."""
        name, value = self.find(*names)
        if value is None and default is not REQUIRED:
            return default
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def number(
        self,
        *names: str,
        default: Default = REQUIRED,
        above: float | None = None,
        low: float | None = None,
        high: float | None = None,
    ) -> float | Default:
        """A finite number, larger than `above`, at least `low` and at most `high`."""
        name, value = self.find(*names)
        if value is None and default is not REQUIRED:
            return default
        if not _is_number(value) or not _is_within(float(value), above, low, high):
            limits = (("above", above), ("at least", low), ("at most", high))
            range_ = ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)
            self.refuse(name, value, f"a finite number {range_}".rstrip())
        return float(value)

    def flag(self, *names: str, default: Default = REQUIRED) -> bool | Default:
        """True or false."""
        name, value = self.find(*names)
        if value is None and default is not REQUIRED:
            return default
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def choice(self, *names: str, allowed: Iterable[str], default: Default = REQUIRED) -> str | Default:
        """One of some words."""
        name, value = self.find(*names)
        if value is None and default is not REQUIRED:
            return default
        words = sorted(allowed)
        if not isinstance(value, str) or value not in words:
            self.refuse(name, value, f"one of {words}")
        return value

    def integers(self, name: str, *, low: int = 0, high: int = LARGEST) -> tuple[int, ...] | None:
        """A list of whole numbers, each within the range; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(type(item) is int and low <= item <= high for item in value):
            self.refuse(name, value, f"a list of whole numbers from {low} to {high}")
        return tuple(value)

    def numbers(self, name: str, *, count: int, what: str, above: float, high: float) -> tuple[float, ...]:
        """A list of `count` finite numbers, one for each `what`, larger than `above` and at most `high`."""
        value = self.get(name)
        items = value if isinstance(value, list | tuple) else ()
        if len(items) != count or not all(_is_number(item) and _is_within(item, above, None, high) for item in items):
            self.refuse(name, value, f"{count} finite numbers above {above:g}, at most {high:g}, one for each {what}")
        return tuple(float(item) for item in items)

    def words(self, name: str, *, allowed: Sequence[str], count: str) -> tuple[str, ...]:
        """A list of words, as many as the setting `count` says."""
        value, size = self.get(name), self.integer(count)
        if not isinstance(value, list | tuple) or len(value) != size or not all(item in allowed for item in value):
            self.refuse(name, value, f"a list of {count}={size}, each one of {list(allowed)}")
        return tuple(value)

    def section(self, name: str) -> ConfigReader | None:
        """Settings within a setting; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(name, value, "an object of settings")
        return ConfigReader(value, fault=self._fault, path=f"{self._path}{name}.")

    def only(self, name: str, *supported: Any) -> None:
        """Refuses every value of a setting but the supported ones."""
        value = self.get(name)
        if value is None or any(_is_same(value, one) for one in supported):
            return
        allowed = " or ".join(repr(one) for one in supported if one is not None) or "absent"
        self.refuse(name, value, f"{allowed}: nothing else is computed here")

    def ignore(self, *names: str) -> None:
        """Counts settings as read that change nothing."""
        self._read.update(names)

    def refuse_unread(
        self, who: str, harmless: Iterable[str] = (), neutral: Mapping[str, tuple[Any, ...]] | None = None
    ) -> None:
        """Refuses settings that nobody asked for, unless they are known to be harmless.

        Args:
            who: what knows the settings.
            harmless: names that may be there with any value.
            neutral: names that may be there with the values that change nothing.
        """
        for name in [name for name in neutral or {} if name not in self._read]:
            self.only(name, *(neutral or {})[name])
        known = self._read.union(harmless)
        unread = [name for name, value in self._values.items() if name not in known and value is not None]
        if unread:
            others = f" (nor {some(unread[1:])})" if unread[1:] else ""
            self.refuse(unread[0], self._values[unread[0]], f"absent: {who} knows no such setting{others}")


def some(items: Sequence[object], separator: str = ", ") -> str:
    """The first few of many, and how many more there are."""
    shown = separator.join(str(item) for item in items[:MOST_NAMED])
    more = len(items) - MOST_NAMED
    return f"{shown}{separator}and {more} more" if more > 0 else shown


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # An integer may be too large for a float.
    return abs(value) <= 1e300 if isinstance(value, int) else math.isfinite(value)


def _is_within(value: float, above: float | None, low: float | None, high: float | None) -> bool:
    return (above is None or value > above) and (low is None or value >= low) and (high is None or value <= high)


def _is_same(value: object, supported: object) -> bool:
    return isinstance(value, bool) == isinstance(supported, bool) and value == supported
