"""Every environment variable that Resin reads: name, type and default in one place."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from resin.plan import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One environment variable.

    Attributes:
        name: the variable.
        parse: text -> value; raises ValueError, whose text says what was expected.
        default: gives the value when the variable is absent or empty.
        meaning: one line for the documentation.
    """

    name: str
    parse: Callable[[str], T]
    default: Callable[[Mapping[str, str]], T]
    meaning: str

    def read(self, environment: Mapping[str, str] | None = None) -> T:
        """Returns the value in an environment (the process's own by default).

        Raises:
            InvalidRequest: the variable holds something else than its type.
        """
        environment = os.environ if environment is None else environment
        text = environment.get(self.name, "")
        if not text:
            return self.default(environment)
        try:
            return self.parse(text)
        except ValueError as error:
            raise InvalidRequest(self.name, text, str(error)) from error


def _parse_directory(text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise ValueError("an absolute directory: nobody's home is known by that name") from None
    if not path.is_absolute():
        raise ValueError("an absolute directory")
    if path.exists() and not path.is_dir():
        raise ValueError("a directory, not a file")
    return path


def _parse_address(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError("an http or https address")
    return text.rstrip("/")


def _parse_token(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("a token of printable characters without spaces")
    return text


def _default_cache(environment: Mapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME", "")
    # The XDG rules ask to ignore a relative path.
    if Path(base).is_absolute():
        return Path(base) / "resin"
    try:
        return Path.home() / ".cache" / "resin"
    except RuntimeError:
        raise InvalidRequest("RESIN_CACHE", None, "an absolute directory: this user has no home") from None


CACHE_DIRECTORY: Setting[Path] = Setting(
    "RESIN_CACHE",
    _parse_directory,
    _default_cache,
    "where downloads and compiled programs are kept; default $XDG_CACHE_HOME/resin, or ~/.cache/resin",
)
HUB_ENDPOINT: Setting[str] = Setting(
    "HF_ENDPOINT",
    _parse_address,
    lambda _: "https://huggingface.co",
    "address of the model hub; default https://huggingface.co",
)
HUB_TOKEN: Setting[str | None] = Setting(
    "HF_TOKEN", _parse_token, lambda _: None, "access token for gated models of the hub; none if absent"
)
API_KEY: Setting[str | None] = Setting(
    "RESIN_API_KEY", _parse_token, lambda _: None, "key that clients of `resin serve` must send; none if absent"
)

SETTINGS: tuple[Setting, ...] = (CACHE_DIRECTORY, HUB_ENDPOINT, HUB_TOKEN, API_KEY)
