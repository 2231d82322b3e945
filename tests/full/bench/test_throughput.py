"""A trace through the engine of a tiny model, and the figures that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.serve import Job
from bench.throughput import BucketUse, arrivals_of, bucket_rows, cut_lengths, ideal_seconds, main
from bench.traces import TraceRequest, load_trace
from resin import Bucket, InvalidRequest, Phase
from resin.models.testing import TINY_CONFIGS, random_checkpoint, write_checkpoint

LENGTHS = [[30, 4], [200, 3], [7, 1], [45, 6]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "lengths.json"
    path.write_text(json.dumps(LENGTHS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TINY_CONFIGS["llama"], "num_hidden_layers": 1}
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", random_checkpoint(config, seed=5))


def sweep_row(phase: str, sequences: int, **figures: float) -> dict[str, Any]:
    known = {"model": "m", "context_tokens": 64, "limit_ms": 1.0, "device": "d", "commit": "c"}
    return {**known, "phase": phase, "sequences": sequences, **figures}


@pytest.mark.parametrize("arrivals", [[], ["--rate", "200"]])
def test_every_token_of_the_trace_is_counted(
    arrivals: list[str], trace: Path, model_directory: Path, tmp_path: Path
) -> None:
    sweep, output = tmp_path / "sweep.jsonl", tmp_path / "report.jsonl"
    rows = [sweep_row("prefill", 1, ms=1.0, tokens_per_s_per_gpu=1000.0), sweep_row("decode", 2, ms=10.0)]
    sweep.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = f"--model {model_directory} --trace {trace} --slots 2 --max-prompt-tokens 64 --max-output-tokens 5"
    arguments += f" --max-plan-tokens 64 --sweep {sweep} --output {output} --commit abc"
    assert main([*arguments.split(), *arrivals]) == 0
    (report,) = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    prompts, outputs = [30, 64, 7, 45], [4, 3, 1, 5]
    assert (report["completed"], report["requests"], report["commit"]) == (4, 4, "abc")
    assert (report["prompt_tokens"], report["output_tokens"]) == (sum(prompts), sum(outputs))
    assert report["ideal_s"] == pytest.approx(sum(prompts) / 1000 + (sum(outputs) - 4) * 0.010 / 2)
    live = {phase: 0.0 for phase in ("prefill", "decode")}
    for row in report["buckets"]:
        live[row["phase"]] += row["fill"] * row["plans"] * row["tokens"]
        assert 0 < row["fill"] <= 1 and row["ms"] == pytest.approx(row["seconds"] / row["plans"] * 1000)
    assert live["prefill"] == pytest.approx(sum(prompts))
    # A plan in flight when a row ends runs it once more.
    assert sum(outputs) - 4 <= live["decode"] <= sum(outputs)
    assert sum(row["seconds"] for row in report["buckets"]) <= report["duration_s"] * 1.05


def test_arrivals_have_the_rate() -> None:
    jobs = [Job(0.0, [1], 1)] * 2000
    assert arrivals_of(jobs, None) == jobs
    times = [job.at_s for job in arrivals_of(jobs, 50.0)]
    assert times == sorted(times) and times[-1] == pytest.approx(2000 / 50, rel=0.1)
    assert times == [job.at_s for job in arrivals_of(jobs, 50.0)]


def test_buckets_by_their_share_of_the_time() -> None:
    small, large = Bucket(Phase.DECODE, 4, 4, (8,)), Bucket(Phase.PREFILL, 4, 128, (8,))
    rows = bucket_rows({small: BucketUse(10, 0.1, 30), large: BucketUse(2, 0.4, 192)})
    assert [(row["phase"], row["ms"], row["fill"]) for row in rows] == [
        ("prefill", pytest.approx(200), pytest.approx(0.75)),
        ("decode", pytest.approx(10), pytest.approx(0.75)),
    ]


def test_the_ideal_takes_the_widest_decode_that_fits() -> None:
    rows = [
        sweep_row("prefill", 1, ms=1.0, tokens_per_s_per_gpu=100.0),
        sweep_row("prefill", 4, ms=1.0, tokens_per_s_per_gpu=400.0),
        sweep_row("decode", 8, ms=4.0),
        sweep_row("decode", 32, ms=8.0, engine_ms=6.4),
        sweep_row("decode", 128, ms=20.0),
    ]
    jobs = [Job(0.0, [1] * 50, 6), Job(0.0, [1] * 30, 11)]
    assert ideal_seconds(rows, jobs, 64) == pytest.approx(80 / 400 + 15 * 0.0064 / 32)
    with pytest.raises(InvalidRequest, match="decode with at most 4"):
        ideal_seconds(rows, jobs, 4)


def test_lengths_are_read_and_cut(trace: Path, tmp_path: Path) -> None:
    assert load_trace(trace) == [TraceRequest(0.0, prompt, output) for prompt, output in LENGTHS]
    assert [each.prompt_tokens for each in cut_lengths(load_trace(trace), 40)] == [30, 40, 7, 40]
    bad = tmp_path / "bad.json"
    bad.write_text("[[1, 2, 3]]", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="trace"):
        load_trace(bad)
