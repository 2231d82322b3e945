"""Charts of sweep results: prefill latency and decode speed a user, each against tokens/s/GPU, with their rooflines.

python -m bench plot results.jsonl
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import input_file
from bench.results import newest_rows, read_results
from resin.plan.extras import require

Row = dict[str, Any]
Point = tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a result file's charts beside it."""
    parser = argparse.ArgumentParser(prog="python -m bench plot", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=input_file, help="JSON lines of a sweep")
    args = parser.parse_args(argv)
    require("plot")
    for path in plot_results(args.results):
        print(path)
    return 0


def plot_results(path: Path) -> list[Path]:
    """Writes `<name>.prefill.png` and `<name>.decode.png` for the phases that the file has; returns their paths."""
    rows = newest_rows(read_results(path))
    written = []
    for phase, x_label, y_label, point in (
        ("prefill", "input tokens/s/GPU", "latency of the whole context, ms", prefill_point),
        ("decode", "output tokens/s/GPU", "output tokens/s/user", decode_point),
    ):
        chosen = [row for row in rows if row["phase"] == phase]
        if chosen:
            target = path.with_suffix(f".{phase}.png")
            _draw(chosen, target, x_label, y_label, point)
            written.append(target)
    return written


def prefill_point(row: Row, step_ms: float) -> Point:
    """(input tokens/s/GPU, latency in ms) if a step takes `step_ms`."""
    return row["sequences"] * row["context_tokens"] / step_ms * 1000, step_ms


def decode_point(row: Row, step_ms: float) -> Point:
    """(output tokens/s/GPU, output tokens/s/user) if a step takes `step_ms`."""
    return row["sequences"] / step_ms * 1000, 1000 / step_ms


def _draw(rows: list[Row], target: Path, x_label: str, y_label: str, point: Callable[[Row, float], Point]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    series: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        series[row["model"], row["context_tokens"]].append(row)
    for index, ((model, context), members) in enumerate(series.items()):
        members.sort(key=lambda row: row["sequences"])
        colour = f"C{index % 10}"
        measured = [point(row, row["ms"]) for row in members]
        limits = [point(row, row["limit_ms"]) for row in members]
        axes.plot(*zip(*measured, strict=True), "o-", color=colour, label=f"{model}, {context} tokens")
        axes.plot(*zip(*limits, strict=True), "--", color=colour, linewidth=1)
        for row, place in zip(members, measured, strict=True):
            axes.annotate(str(row["sequences"]), place, textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
    axes.set_title(f"{rows[0]['device']}; numbers are sequences, dashes the roofline", fontsize=10)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=120)
