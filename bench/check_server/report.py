"""The report: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.check_server.outcome import Result, Status

TEXT_CHARACTERS = 110


def summary(results: Sequence[Result]) -> dict[str, int]:
    """How many checks came to what."""
    return {status.value: sum(result.status is status for result in results) for status in Status}


def write_report(path: Path, header: Mapping[str, Any], results: Sequence[Result]) -> None:
    """Writes the JSON report to `path`, and the same as Markdown beside it."""
    document = {**header, "summary": summary(results), "checks": [asdict(result) for result in results]}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(header, results), encoding="utf-8")


def markdown(header: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The report as a Markdown page."""
    counts = ", ".join(f"{count} {name}" for name, count in summary(results).items())
    lines = [f"# Server checks: {header['model']}", "", f"{header['url']}, {header['started']}: {counts}.", ""]
    lines += ["| check | result | seconds | figures, or why not |", "| --- | --- | ---: | --- |"]
    for result in results:
        text = describe(result).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {result.group}: {result.name} | {result.status.value} | {result.seconds:.1f} | {text} |")
    return "\n".join(lines) + "\n"


def line(result: Result) -> str:
    """One result for the terminal."""
    label = f"{result.group}: {result.name}"
    return f"{result.status.value.upper():<8}{label:<40}{result.seconds:>7.1f} s  {describe(result)}"


def describe(result: Result) -> str:
    """Reason and figures in one line; lists of items are left to the JSON report."""
    parts = [result.reason] if result.reason else []
    parts += [f"{name} {_short(value)}" for name, value in result.figures.items() if not isinstance(value, list)]
    return "; ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= TEXT_CHARACTERS else text[:TEXT_CHARACTERS] + "..."
