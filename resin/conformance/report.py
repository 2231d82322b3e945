"""What a verification found, as data and as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One property.

    Attributes:
        name: what was compared.
        passed: None if the model has nothing to check here.
        detail: the largest difference, or the first fault.
        seconds: how long it took.
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one model, in the order in which they ran."""

    model: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return all(check.passed is not False for check in self.checks)

    def check(self, name: str) -> Check:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        width = max((len(check.name) for check in self.checks), default=0)
        words = {True: "pass", False: "FAIL", None: "-"}
        lines = [
            f"{words[check.passed]:4}  {check.name:{width}}  {check.seconds:6.1f} s  {check.detail}"
            for check in self.checks
        ]
        failed = sum(check.passed is False for check in self.checks)
        verdict = f"{failed} of {len(self.checks)} checks failed" if failed else f"all {len(self.checks)} checks passed"
        return "\n".join([self.model, *lines, verdict])
