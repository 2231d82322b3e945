"""The simulator: its cache against the plain LRU, its clock against its own latency model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.simulate import (
    LatencyModel,
    TimedRunner,
    compare_sequential,
    main,
    percentiles,
    sequential_hits,
    simulate,
    simulated_config,
)
from bench.traces import BLOCK_TOKENS, TraceRequest, ideal_hits, lru_hits
from resin import Bucket, Engine, Phase, SamplingParams

LATENCY = LatencyModel(prefill_base_ms=5, prefill_token_ms=0.01, decode_base_ms=2, decode_token_ms=0.1)


def conversations(seed: int, count: int = 30) -> list[TraceRequest]:
    """Several conversations that take turns, each turn a longer prefix; some texts appear in many of them."""
    draw = random.Random(seed)
    open_: list[list[int]] = [[draw.randrange(3)] for _ in range(6)]
    fresh, trace = 100, []
    for i in range(count):
        turn = draw.choice(open_)
        for _ in range(draw.randrange(1, 3)):
            fresh += 1
            turn.append(fresh)
        if draw.random() < 0.2:
            open_[draw.randrange(6)] = [draw.randrange(3)]
        tokens = BLOCK_TOKENS * (len(turn) - 1) + draw.randrange(1, BLOCK_TOKENS + 1)
        trace.append(TraceRequest(i * 0.2, tokens, draw.randrange(1, 12), tuple(turn)))
    return trace


def reported(trace: list[TraceRequest], **settings: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "cache_tokens": 60_000,
        "page_tokens": 16,
        "max_sequences": 8,
        "plan_tokens": 2048,
        "latency": LATENCY,
    }
    return simulate(trace, **options | settings)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sequential_hits_are_ideal_without_a_bound_and_plain_lru_or_better_with_one(seed: int) -> None:
    trace = conversations(seed)
    assert sequential_hits(trace, None) == ideal_hits(trace)
    longest = max(len(request.blocks) for request in trace)
    better = 0
    for capacity in (longest + 1, longest + 4, 2 * longest, 4 * longest):
        hits, total = sequential_hits(trace, capacity)
        plain, blocks = lru_hits(trace, capacity)
        assert hits >= plain and total == blocks
        better += hits > plain
    assert better, "evicting leaves first keeps what a plain LRU loses"


def test_the_comparison_reports_both_and_the_pool_that_it_used() -> None:
    trace = conversations(4)
    endless, small = compare_sequential(trace, [1])
    hits, total = ideal_hits(trace)
    assert endless["capacity_tokens"] == "unbounded"
    assert endless["engine_hits"] == endless["plain_lru_hits"] == hits and endless["blocks"] == total
    assert endless["engine_hit_share"] == pytest.approx(hits / total, abs=1e-6)
    longest = max(len(request.blocks) for request in trace)
    assert small["capacity_tokens"] == (longest + 1) * BLOCK_TOKENS, "never less than the longest prompt needs"


def test_the_clock_is_the_sum_of_the_plans() -> None:
    """One request: its first token after its chunks, each later one after one decode plan; the host is free."""
    trace = [TraceRequest(3.0, 3000, 5)]
    result = reported(trace, plan_tokens=2048)
    prefill = (5 + 0.01 * 2048 + 2 * (5 + 0.01 * 512)) / 1000  # 2,048 tokens, then 512 and 440: less than 952 in 2,048
    decode = (2 + 0.1) / 1000
    assert result["requests"] == 1 and result["retractions"] == 0
    assert result["ttft_s"]["p50"] == pytest.approx(prefill, abs=1e-4)
    assert result["latency_s"]["p50"] == pytest.approx(prefill + 4 * decode, abs=1e-4)
    assert result["simulated_s"] == pytest.approx(3.0 + prefill + 4 * decode, abs=0.06)
    assert result["output_tokens_per_s"] == pytest.approx(5 / (3.0 + prefill + 4 * decode), abs=0.05)


def test_fill_counts_live_tokens_over_bucket_tokens() -> None:
    result = reported([TraceRequest(0.0, 3000, 5)], plan_tokens=2048)
    assert result["bucket_fill"]["prefill"] == pytest.approx(3000 / 3072, abs=1e-4)
    assert result["bucket_fill"]["decode"] == 1.0


def test_reports_are_consistent() -> None:
    trace = conversations(5, 60)
    result = reported(trace)
    assert result["requests"] == len(trace)
    outputs = sum(request.output_tokens for request in trace)
    assert result["output_tokens_per_s"] * result["simulated_s"] == pytest.approx(outputs, rel=0.02)
    for name in ("ttft_s", "latency_s"):
        spread = result[name]
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]
    assert result["ttft_s"]["p50"] <= result["latency_s"]["p50"]
    assert all(0 < fill <= 1 for fill in result["bucket_fill"].values())
    assert 0 < result["prefix_hit_share"] < 1
    hits, blocks = ideal_hits(trace)
    assert result["ideal_hit_share_of_blocks"] == pytest.approx(hits / blocks, abs=1e-4)
    cold = reported(trace, prefix_cache=False)
    assert cold["prefix_hit_share"] == 0 and cold["prefix_lost_tokens"] == {}
    assert cold["ttft_s"]["p90"] > result["ttft_s"]["p90"], "what is cached is not computed"
    faster = reported(trace, speed=4.0)
    assert faster["latency_s"]["p90"] >= result["latency_s"]["p90"] and faster["simulated_s"] < result["simulated_s"]
    assert reported(trace) == result, "the same again"


def test_memory_pressure_shows() -> None:
    trace = [TraceRequest(0.0, 200, 600) for _ in range(8)]
    result = reported(trace, cache_tokens=2000, prefix_cache=False)
    assert result["retractions"] > 0 and result["requests"] == 8


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_timed_runner_serves_as_any_other(overlap: bool) -> None:
    runner = TimedRunner(simulated_config(16, 4, 300, 64), LATENCY)
    with Engine(runner, overlap=overlap, clock=runner.clock) as engine:
        sent = [engine.submit(range(i, i + 100), sampling_params=SamplingParams(max_output_tokens=9)) for i in range(6)]
        while engine.has_work():
            engine.step()
        assert all(request.take_result() == [0] * 9 for request in sent)
        ends = [request.finished_s or 0.0 for request in sent]
        assert ends == sorted(ends) and ends[-1] <= runner.now_s


def test_latency_of_a_bucket() -> None:
    assert LATENCY.plan_s(Bucket(Phase.PREFILL, 4, 100, ())) == pytest.approx(0.006)
    assert LATENCY.plan_s(Bucket(Phase.DECODE, 10, 10, ())) == pytest.approx(0.003)


def test_percentiles() -> None:
    found = percentiles([float(i) for i in range(101)])
    assert (found.p50, found.p90, found.p99) == (50, 90, 99)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * r.arrival_s, "input_length": r.prompt_tokens, "output_length": 2, "hash_ids": r.blocks}
        for r in conversations(7, 12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--page-tokens", "64", "--max-sequences", "4", "--cache-tokens", "40000", "--limit", "10"]
    assert main([str(path), *options, "--decode-base-ms", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 10
    assert main([str(path), "--sequential", "--limit", "8", "--cache-tokens", "8192", "16384"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 and lines[0]["engine_hits"] == lines[0]["plain_lru_hits"]


def test_sequential_needs_contents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n2500,10\n")
    with pytest.raises(SystemExit):
        main([str(path), "--sequential"])
    assert "hash_ids" in capsys.readouterr().err


def test_prompts_fit_the_config() -> None:
    config = simulated_config(16, 8, 1000, 512)
    assert config.geometry.groups[0].span_tokens == 16 and config.max_plan_tokens == 512
    sizes = [bucket.tokens for bucket in config.buckets]
    assert sizes == [512, 1, 4, 8]
