"""Request traces: arrival times, prompts that share prefixes where the trace says so, and output lengths."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from resin import InvalidRequest

BLOCK_TOKENS = 512  # of Mooncake's hash ids


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds after the trace's start.
        blocks: one id for each `BLOCK_TOKENS` prompt tokens; equal leading ids are equal prefixes. Empty if the trace
            knows no contents: then no two prompts share anything.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def load_trace(path: Path) -> list[TraceRequest]:
    """Reads a Mooncake (`.jsonl[.gz]`), Azure or Vidur (`.csv[.gz]`) trace, or a JSON list of [prompt, output] lengths.

    Raises:
        InvalidRequest: the file has none of the known columns, or is damaged.
    """
    try:
        return _read_trace(path)
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest("trace", str(path), f"a Mooncake, Azure or Vidur trace ({error!r})") from error


def _read_trace(path: Path) -> list[TraceRequest]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        if ".jsonl" in path.name:
            return [_from_mooncake(json.loads(line)) for line in file if line.strip()]
        if ".json" in path.name:
            return [TraceRequest(0.0, int(prompt), int(output)) for prompt, output in json.load(file)]
        rows = list(csv.DictReader(file))
    names = set(rows[0]) if rows else set()
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        return [
            TraceRequest(time - times[0], int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for time, row in zip(times, rows, strict=True)
        ]
    if {"num_prefill_tokens", "num_decode_tokens"} <= names:
        return [TraceRequest(0.0, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows]
    raise InvalidRequest("trace", sorted(names), "the columns of a Mooncake, Azure or Vidur trace")


def _from_mooncake(row: dict[str, object]) -> TraceRequest:
    blocks = tuple(int(block) for block in row["hash_ids"])  # type: ignore[attr-defined]
    prompt, output = int(row["input_length"]), int(row["output_length"])  # type: ignore[call-overload]
    return TraceRequest(float(row["timestamp"]) / 1000, prompt, output, blocks)  # type: ignore[arg-type]


def block_prompt(blocks: Sequence[int]) -> np.ndarray:
    """int32 tokens of whole blocks, every block a fixed text of its own."""
    starts = np.asarray(blocks, np.int32)[:, None] * BLOCK_TOKENS
    return (starts + np.arange(BLOCK_TOKENS, dtype=np.int32)).reshape(-1)


def prompts(trace: Sequence[TraceRequest]) -> Iterator[np.ndarray]:
    """int32 prompt of each request: its blocks cut to the prompt length, or tokens that nobody shares."""
    fresh = 1 << 30
    for request in trace:
        if request.blocks:
            yield block_prompt(request.blocks)[: request.prompt_tokens]
        else:
            fresh -= request.prompt_tokens
            yield np.arange(fresh, fresh + request.prompt_tokens, dtype=np.int32)


def ideal_hits(trace: Sequence[TraceRequest]) -> tuple[int, int]:
    """Blocks that an endless cache would hit, and all blocks, requests one after another."""
    return lru_hits(trace, None)


def lru_hits(trace: Sequence[TraceRequest], capacity_blocks: int | None) -> tuple[int, int]:
    """Blocks that a plain least-recently-used cache of the capacity hits, and all blocks.

    Independent of the engine: an ordered dictionary of prefixes, touched in prompt order. A prompt's last block is
    never a hit, because its last token must be computed.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for request in trace:
        matching = True
        prefix = 0
        total += len(request.blocks)
        for place, block in enumerate(request.blocks, 1):
            prefix = hash((prefix, block))
            matching = matching and prefix in cache
            hits += matching and place < len(request.blocks)
            cache[prefix] = None
            cache.move_to_end(prefix)
            if capacity_blocks is not None and len(cache) > capacity_blocks:
                cache.popitem(last=False)
    return hits, total
