"""Several processes run one model together, give one process's tokens, and end together however one of them ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from resin import Engine
from tests.ranks import build, generate

ROOT = Path(__file__).parents[3]
LIMIT_S = 10.0  # from a fault to the end of all ranks
START_S = 240.0
Ranks = list[subprocess.Popen[str]]


def free_port() -> int:
    """Two ports in a row that nobody has."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def start(rank: int, processes: int, port: int, what: str, devices: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ranks", *map(str, (rank, processes, port)), what]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@contextmanager
def running(processes: int, what: str, others: Mapping[int, str] | None = None) -> Iterator[Ranks]:
    """All ranks; nothing is left of them."""
    port = free_port()
    ranks = [start(rank, processes, port, (others or {}).get(rank, what)) for rank in range(processes)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def first_line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return next(line for line in rank.stdout if not line.startswith("[Gloo]"))


def told(rank: subprocess.Popen[str], limit_s: float = LIMIT_S) -> str:
    """What a rank that fails leaves on standard error."""
    _, log = rank.communicate(timeout=limit_s)
    assert rank.returncode not in (0, None)
    return log


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tokens_equal_one_process(processes: int) -> None:
    with running(processes, "end") as ranks:
        tokens = json.loads(first_line(ranks[0]))
        for rank in ranks:
            rank.communicate(timeout=LIMIT_S)
            assert rank.returncode == 0
    with Engine(build(1), prefix_cache=True) as engine:
        assert tokens == generate(engine)


def test_a_worker_is_killed() -> None:
    with running(2, "go on") as ranks:
        first_line(ranks[0])
        ranks[1].kill()
        assert "resin: " in told(ranks[0])


def test_rank_0_is_killed() -> None:
    with running(2, "go on") as ranks:
        first_line(ranks[0])
        ranks[0].kill()
        assert "resin: rank 0 has ended" in told(ranks[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_hangs(rank: int) -> None:
    with running(2, "go on") as ranks:
        first_line(ranks[0])
        os.kill(ranks[rank].pid, signal.SIGSTOP)
        assert f"rank {rank} has said nothing for 4 s" in told(ranks[1 - rank])


def test_a_rank_of_another_program_ends_the_start() -> None:
    with running(2, "end", {1: "other"}) as ranks:
        assert "rank 1 runs other code, options or model than rank 0" in told(ranks[0], START_S)
        assert "rank 0 refuses: rank 1 runs other code, options or model" in told(ranks[1])


def test_a_late_joiner_is_refused_and_the_others_go_on() -> None:
    port = free_port()
    ranks = [start(rank, 2, port, "go on") for rank in range(2)]
    try:
        first_line(ranks[0])
        late = start(1, 2, port, "end")
        assert "rank 0 refuses: rank 1 is here already" in told(late, START_S)
        time.sleep(0.5)
        assert [rank.poll() for rank in ranks] == [None, None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
