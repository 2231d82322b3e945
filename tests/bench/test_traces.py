"""Traces: every format that is read, prompts that share what the trace says, and the plain LRU beside the engine."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from bench.traces import BLOCK_TOKENS, TraceRequest, block_prompt, ideal_hits, load_trace, lru_hits, prompts
from resin import InvalidRequest

MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 2500, "input_length": 1100, "output_length": 0, "hash_ids": [1, 2, 9]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:05.2320690,396,109\n"
)
VIDUR = "num_prefill_tokens,num_decode_tokens\n2500,10\n30,4\n"


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mooncake(tmp_path: Path, suffix: str) -> None:
    text = "".join(json.dumps(row) + "\n" for row in MOONCAKE) + "\n"
    assert load_trace(write(tmp_path / f"trace.jsonl{suffix}", text)) == [
        TraceRequest(0.0, 1000, 5, (1, 2)),
        TraceRequest(2.5, 1100, 0, (1, 2, 9)),
    ]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_azure(tmp_path: Path, suffix: str) -> None:
    first, second = load_trace(write(tmp_path / f"trace.csv{suffix}", AZURE))
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(1.252109) and (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_vidur(tmp_path: Path) -> None:
    assert load_trace(write(tmp_path / "trace.csv", VIDUR)) == [TraceRequest(0.0, 2500, 10), TraceRequest(0.0, 30, 4)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,3\n"])
def test_other_files_are_refused_with_their_columns(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="columns") as error:
        load_trace(write(tmp_path / "trace.csv", text))
    assert error.value.field == "trace"


def test_equal_blocks_are_equal_prefixes() -> None:
    trace = [TraceRequest(0, 1000, 1, (4, 7)), TraceRequest(1, 1024, 1, (4, 7)), TraceRequest(2, 600, 1, (4, 8))]
    first, second, third = prompts(trace)
    assert (len(first), len(second), len(third)) == (1000, 1024, 600) and first.dtype == np.int32
    assert np.array_equal(first, second[:1000]) and np.array_equal(first[:512], third[:512])
    assert not set(first[512:].tolist()) & set(third[512:].tolist())
    assert len(set(block_prompt([4, 7]).tolist())) == 2 * BLOCK_TOKENS


def test_prompts_of_traces_without_contents_share_nothing() -> None:
    seen: set[int] = set()
    for request, prompt in zip(trace := [TraceRequest(0, 50, 1)] * 4, prompts(trace), strict=True):
        assert len(prompt) == request.prompt_tokens and not seen & set(prompt.tolist())
        assert prompt.min() >= 0
        seen |= set(prompt.tolist())


def requests_of(*blocks: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(i, BLOCK_TOKENS * len(ids), 1, ids) for i, ids in enumerate(blocks)]


def test_ideal_hits_by_hand() -> None:
    trace = requests_of((1, 2, 3), (1, 2, 4), (1, 2, 3), (2, 3), (1,), (1, 2, 4, 5))
    # (1,2) again; (1,2), the last block never; nothing starts with 2; the only block of a prompt never; (1,2,4).
    assert ideal_hits(trace) == (2 + 2 + 0 + 0 + 3, 16)


def test_plain_lru_by_hand() -> None:
    trace = requests_of((1, 2), (3, 4), (1, 2, 5))
    assert lru_hits(trace, None) == (2, 7)
    assert lru_hits(trace, 4) == (2, 7)
    assert lru_hits(trace, 3) == (0, 7), "the head of the prefix left first"


def test_plain_lru_against_a_slow_copy() -> None:
    draw = random.Random(6)
    for _ in range(40):
        pool = [tuple(draw.randrange(3) for _ in range(draw.randrange(1, 6))) for _ in range(6)]
        trace = requests_of(*(draw.choice(pool) for _ in range(30)))
        for capacity in (None, 3, 8, 15):
            recent: list[tuple[int, ...]] = []
            hits = 0
            for request in trace:
                prefixes = [request.blocks[: i + 1] for i in range(len(request.blocks))]
                going = True
                for place, prefix in enumerate(prefixes):
                    going = going and prefix in recent
                    hits += going and place + 1 < len(prefixes)
                    if prefix in recent:
                        recent.remove(prefix)
                    recent.append(prefix)
                    if capacity is not None:
                        recent = recent[-capacity:]
            assert lru_hits(trace, capacity) == (hits, sum(len(request.blocks) for request in trace))
