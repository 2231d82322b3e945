"""The server driver against the real server on a scripted runner."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.serve import Job, Outcome, build_jobs, main, summarise
from bench.traces import TraceRequest
from tests.serve.running import running_server
from tests.serve.scripted_runner import TOKENIZER, ScriptedRunner


def jobs_of(trace: list[TraceRequest], **changes: float) -> list[Job]:
    settings = {"scale": 1.0, "length_scale": 1.0, "max_output_tokens": 100, "vocab_size": 32000} | changes
    return build_jobs(trace, **settings)  # type: ignore[arg-type]


def test_prompts_share_what_the_trace_shares() -> None:
    trace = [
        TraceRequest(0.0, 1300, 20, (7, 8, 9)),
        TraceRequest(3.0, 1400, 500, (7, 8, 10)),
        TraceRequest(2.0, 600, 30),
        TraceRequest(4.0, 600, 30),
    ]
    first, third, second, fourth = jobs_of(trace, scale=2.0)
    assert [job.at_s for job in (first, third, second, fourth)] == [0.0, 1.0, 1.5, 2.0]
    assert [len(job.prompt) for job in (first, second, third)] == [1300, 1400, 600]
    assert second.output_tokens == 100
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:1300]
    assert not set(map(tuple, np.reshape(third.prompt, (-1, 2)))) & set(map(tuple, np.reshape(fourth.prompt, (-1, 2))))
    assert all(1000 <= token < 32000 for job in (first, second, third) for token in job.prompt)


def test_scaled_lengths_keep_shared_prefixes() -> None:
    trace = [TraceRequest(0.0, 1024, 40, (1, 2)), TraceRequest(0.0, 1024, 40, (1, 3))]
    first, second = jobs_of(trace, length_scale=0.125, scale=float("inf"))
    assert (len(first.prompt), first.output_tokens, first.at_s) == (128, 5, 0.0)
    assert first.prompt[:64] == second.prompt[:64] and first.prompt[64:] != second.prompt[64:]


def test_percentiles_by_hand() -> None:
    outcomes = [
        Outcome(0.0, 0.1, [0.3, 0.4, 0.6], prompt_tokens=10, output_tokens=3),
        Outcome(1.0, 1.0, [1.4, 2.1], prompt_tokens=20, output_tokens=5),
        Outcome(0.5, 0.5, error="status 500: no"),
    ]
    report = summarise(outcomes)
    assert (report["requests"], report["completed"], report["errors"]) == (3, 2, ["status 500: no"])
    assert report["duration_s"] == pytest.approx(2.0)
    assert report["output_tokens_per_s"] == pytest.approx(4.0)
    assert report["ttft_ms"]["p50"] == pytest.approx(300.0)
    assert report["itl_ms"]["p50"] == pytest.approx(200.0)
    assert report["latency_ms"]["p99"] == pytest.approx(1100, rel=0.01)
    assert report["client_wait_ms"]["p50"] == pytest.approx(50.0)


def test_a_run_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:46.{place}805900,{40 + place},{6 + place}" for place in range(6)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    report_path = tmp_path / "report.json"
    options = f"--scale 20 --max-concurrency 2 --vocab-size {TOKENIZER.vocab_size} --output {report_path}"
    runner = ScriptedRunner(default="abcdefghijklmnop" * 4, step_s=0.002)
    with running_server(runner) as server:
        assert main([server.url, "--trace", str(trace), *options.split()]) == 0
    report = json.loads(report_path.read_text())
    assert report["completed"] == 6
    assert report["prompt_tokens"] == sum(40 + place for place in range(6))
    assert report["output_tokens"] == sum(6 + place for place in range(6))
    assert report["ttft_ms"]["p50"] > 0 and report["itl_ms"]["p50"] > 0
    assert "6 of 6 requests completed" in capsys.readouterr().out


def test_failures_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    # Longer than the runner's context of 4096 tokens.
    trace.write_text("num_prefill_tokens,num_decode_tokens\n5000,4\n20,4\n")
    with running_server(ScriptedRunner()) as server:
        assert main([server.url, "--trace", str(trace), "--vocab-size", str(TOKENIZER.vocab_size)]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 requests completed" in out and "status 400" in out
