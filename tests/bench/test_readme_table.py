"""The README's table comes from result files, between its markers, and can be checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.readme_table import BEGIN, END, build_table, main, replace_table
from bench.results import newest_rows
from resin import InvalidRequest

ROW: dict[str, Any] = {
    "model": "qwen3-0.6b",
    "phase": "decode",
    "sequences": 1,
    "context_tokens": 1024,
    "dtype": "bfloat16",
    "ms": 1.234,
    "limit_ms": 0.3,
    "limit_fraction": 0.243,
    "tokens_per_s_per_gpu": 810.4,
    "kernels": 231,
    "host_call_ms": 0.98,
    "copy_bytes_per_s": 4.31e12,
    "matmul_flops_per_s": 7.9e14,
    "device": "GPU A",
    "commit": "abc",
    "jax": "0.11.2",
}
LINE = "| qwen3-0.6b, bfloat16 | decode 1 x 1024 | 1.23 | 24% | 810 |  | 231 | 0.98 |"


def test_a_row_reads_as_measured() -> None:
    table = build_table([ROW])
    assert LINE in table.splitlines()
    assert "GPU A, jax 0.11.2, commit abc" in table
    assert "4.31 TB/s" in table and "790 TFLOP/s" in table


def test_engine_figures_and_sampling_are_named() -> None:
    sampling = {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    row = ROW | {"engine_ms": 1.3, "engine_ratio": 1.05, "sampling": sampling, "balanced_experts": True}
    (line,) = [line for line in build_table([row]).splitlines() if line.startswith("| qwen3")]
    assert "1.30 ms (+5.0%) |" in line and "top-k 40, top-p 0.9" in line and "balanced experts" in line


def test_what_a_case_was_run_with_is_named_and_keeps_it_apart() -> None:
    special = {"cache_dtype": "float8_e4m3fn", "xla_flags": "--xla_one=2", "engine_ms": 1.3, "engine_ratio": 1.05}
    rows = newest_rows([ROW, ROW | special | {"overlap": 2}, ROW | {"xla_flags": ""}])
    assert len(newest_rows([ROW, ROW | {"xla_flags": "--xla_one=2"}])) == 2
    _, line = [line for line in build_table(rows).splitlines() if line.startswith("| qwen3")]
    assert "bfloat16, 8-bit cache, `--xla_one=2` |" in line and "1.30 ms (+5.0%), overlap 2 |" in line


def test_later_rows_replace_earlier_ones_of_the_same_case() -> None:
    rows = [ROW, ROW | {"sequences": 8}, ROW | {"ms": 1.1}]
    assert [(row["sequences"], row["ms"]) for row in newest_rows(rows)] == [(1, 1.1), (8, 1.234)]


def test_devices_have_tables_of_their_own() -> None:
    table = build_table([ROW, ROW | {"device": "GPU B", "copy_bytes_per_s": 2e12}])
    assert table.count("| model |") == 2
    assert "GPU B, " in table and "2 TB/s" in table


def test_only_the_part_between_the_markers_changes(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "a.jsonl"
    readme.write_text(f"# Before\n\n{BEGIN}\nold\n{END}\n\nAfter\n")
    results.write_text(json.dumps(ROW) + "\n")
    assert main([str(results), "--readme", str(readme), "--check"]) == 1
    assert main([str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"# Before\n\n{BEGIN}\n\n| model |") and text.endswith(f"\n\n{END}\n\nAfter\n")
    assert LINE in text and "old" not in text
    assert main([str(results), "--readme", str(readme), "--check"]) == 0


def test_missing_markers_are_an_error() -> None:
    for text in ("nothing", f"{END} {BEGIN}"):
        with pytest.raises(InvalidRequest, match="readme"):
            replace_table(text, "table")
