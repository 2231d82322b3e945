"""What a check comes to: pass, fail or skipped, with a reason and figures."""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Figures = dict[str, Any]


class Status(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIPPED = "skipped"


class Failed(Exception):
    """The server did something that it must not do."""


class Skipped(Exception):
    """The server does not offer what the check is about, or gave nothing to judge."""


def require(condition: object, message: str) -> None:
    """Raises Failed with the message unless the condition holds."""
    if not condition:
        raise Failed(message)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the report.

    Attributes:
        reason: why it failed or was skipped; "" for a pass.
        figures: numbers and short texts by name; units are in the names.
    """

    name: str
    group: str
    status: Status
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


async def run_check(name: str, group: str, work: Callable[[Figures], Awaitable[None]]) -> Result:
    """Runs a check; whatever the server answers, and if it does not answer, this returns."""
    figures: Figures = {}
    started = time.perf_counter()
    status, reason = Status.PASS, ""
    try:
        await work(figures)
    except Skipped as error:
        status, reason = Status.SKIPPED, str(error)
    except Failed as error:
        status, reason = Status.FAIL, str(error)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        status, reason = Status.FAIL, f"{type(error).__name__}: {error}"
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        # An answer that lacks a field, or has another kind of value in it.
        status, reason = Status.FAIL, f"the answer has another shape than the API's ({type(error).__name__}: {error})"
    return Result(name, group, status, reason[:500], figures, time.perf_counter() - started)
