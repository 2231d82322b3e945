"""`python -m bench readme_table`: writes the README's benchmark table from the checked-in result files.

The table stands between two comment lines of the README; nothing else is touched. `--check` writes nothing and fails
if the README is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results import newest_rows, read_results
from resin import InvalidRequest
from resin.plan.cache import FP8_DTYPE

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- benchmark table: python -m bench readme_table -->"
END = "<!-- end of the benchmark table -->"
COLUMNS = "| model | case | ms | of the limit | tokens/s/GPU | through the Engine | kernels | call, ms |"
RULE = "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the table."""
    parser = argparse.ArgumentParser(prog="python -m bench readme_table", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="*", help="default: bench/results/*.jsonl")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args(argv)
    paths = args.results or sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    before = args.readme.read_text(encoding="utf-8")
    after = replace_table(before, build_table([row for path in paths for row in read_results(path)]))
    if args.check:
        if after != before:
            print(f"{args.readme} is out of date: python -m bench readme_table", file=sys.stderr)
        return int(after != before)
    args.readme.write_text(after, encoding="utf-8")
    return 0


def replace_table(text: str, table: str) -> str:
    """The text with what stands between the markers replaced.

    Raises:
        InvalidRequest: the markers are not there, in this order.
    """
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise InvalidRequest("readme", "no markers", f"{BEGIN!r} and {END!r}, in this order")
    return f"{text[: begin + len(BEGIN)]}\n\n{table}\n\n{text[end:]}"


def build_table(rows: list[dict[str, Any]]) -> str:
    """One Markdown table a device, the newest row of each case, with what the figures were measured by."""
    if not rows:
        return "No results are checked in yet."
    parts = []
    newest = newest_rows(rows)
    for device in dict.fromkeys(row["device"] for row in newest):
        mine = sorted((row for row in newest if row["device"] == device), key=_order)
        parts.append("\n".join([COLUMNS, RULE, *map(_line, mine), "", _source(device, mine)]))
    return "\n\n".join(parts)


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["phase"], row["context_tokens"], row["sequences"]


def _line(row: dict[str, Any]) -> str:
    case = f"{row['phase']} {row['sequences']} x {row['context_tokens']}"
    sampling = row.get("sampling") or {}
    if sampling.get("top_k") or sampling.get("top_p", 1.0) < 1:
        case += f", top-k {sampling['top_k']}, top-p {sampling['top_p']}"
    engine = f"{row['engine_ms']:.2f} ms ({row['engine_ratio'] - 1:+.1%})" if "engine_ms" in row else ""
    engine += f", overlap {row['overlap']}" if row.get("overlap", 1) != 1 else ""
    model = f"{row['model']}, {row['dtype']}" + (", balanced experts" if row.get("balanced_experts") else "")
    model += ", 8-bit cache" if row.get("cache_dtype") == FP8_DTYPE else ""
    model += ", paged prefill" if row.get("paged_prefill") else ""
    model += f", `{row['xla_flags']}`" if row.get("xla_flags") else ""
    cells = (
        model,
        case,
        f"{row['ms']:.2f}",
        f"{row['limit_fraction']:.0%}",
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        engine,
        str(row["kernels"]),
        f"{row['host_call_ms']:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def _source(device: str, rows: list[dict[str, Any]]) -> str:
    copies = [row["copy_bytes_per_s"] / 1e12 for row in rows]
    products = [row["matmul_flops_per_s"] / 1e12 for row in rows]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    versions = ", ".join(dict.fromkeys(f"jax {row['jax']}" for row in rows))
    return (
        f"{device}, {versions}, commit {commits}; `python -m bench sweep`, protocol in "
        f"[docs/benchmarking.md](docs/benchmarking.md). The limit is the slower of bytes at the measured copy rate "
        f"({_span(copies)} TB/s) and operations at the measured product rate ({_span(products)} TFLOP/s)."
    )


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
