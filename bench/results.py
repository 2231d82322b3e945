"""Result files of `python -m bench sweep`: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resin import InvalidRequest

REQUIRED = ("model", "phase", "sequences", "context_tokens", "ms", "limit_ms", "device", "commit")


def read_results(path: Path) -> list[dict[str, Any]]:
    """Every row of a file, in order.

    Raises:
        InvalidRequest: a line is no result row.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        missing = [name for name in REQUIRED if name not in row] if isinstance(row, dict) else REQUIRED
        if missing:
            raise InvalidRequest("results", f"{path.name}:{number}", f"a result row with {', '.join(missing)}")
        rows.append(row)
    return rows


def newest_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each case, in the order in which the cases first appear: later runs replace earlier ones."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        newest[case_key(row)] = row
    return list(newest.values())


def case_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two rows the same case."""
    return (
        row["device"],
        row["model"],
        row.get("dtype"),
        row.get("cache_dtype"),
        row["phase"],
        row["context_tokens"],
        row["sequences"],
        row.get("balanced_experts", False),
        row.get("paged_prefill", False),
        row.get("xla_flags", ""),
        json.dumps(row.get("sampling"), sort_keys=True),
    )
