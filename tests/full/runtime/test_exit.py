"""A program that ran a model ends with the status that it chose: no thread of XLA's comes too late."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resin import ArenaSpec
from resin.runtime import build_runner
from resin.runtime.arena import DeviceState
from tests.runtime.tiny_runner import NUM_PAGES, builder_for, tiny_checkpoint, tiny_options

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys
from resin import Engine, SamplingParams
from resin.models.testing import TINY_CONFIGS, random_checkpoint
from resin.runtime import RunnerOptions, build_runner

way, cache = sys.argv[1:]
sizes = {"max_sequences": 4, "max_context_tokens": 512, "decode_sequences": (4,), "prefill_tokens": (32,)}
options = RunnerOptions(compile_cache=cache, **sizes)
runner = build_runner(random_checkpoint(TINY_CONFIGS["llama"], seed=5), options)

def step(engine, times):
    engine.submit([1, 2, 3], sampling_params=SamplingParams(max_output_tokens=400, ignore_stop=True))
    for _ in range(times):
        engine.step()
    print("stepped", flush=True)

if way == "closed":
    with Engine(runner) as engine:
        step(engine, 5)
elif way == "open":
    engine = Engine(runner)
    step(engine, 5)
elif way == "dropped":
    step(Engine(runner), 5)
    del runner
elif way == "exception":
    with Engine(runner) as engine:
        step(engine, 5)
        raise SystemExit(3)
elif way == "interrupt":
    with Engine(runner) as engine:
        while True:
            step(engine, 5)
"""
STATUS = {"closed": 0, "open": 0, "dropped": 0, "exception": 3, "interrupt": -signal.SIGINT}


def run_program(way: str, cache: Path) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, way, str(cache)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if way == "interrupt":
            time.sleep(random.uniform(0, 0.1))
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


@pytest.mark.parametrize("way", STATUS)
def test_a_program_ends_as_it_wants(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    status, errors = run_program(way, tmp_path_factory.getbasetemp() / "programs")
    assert status == STATUS[way], errors
    assert "terminate" not in errors and "Exception ignored" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("way", STATUS)
def test_many_programs_end_as_they_want(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp() / "programs"
    results = [run_program(way, cache) for _ in range(20)]
    assert [status for status, _ in results] == [STATUS[way]] * 20, results


def threads_in_the_interpreter() -> int:
    """Threads that the interpreter knows: its own, and foreign ones that hold its lock or wait for it."""
    api = ctypes.PyDLL(None)  # keeps the lock while it runs
    for name in ("PyInterpreterState_Main", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(api, name).restype = ctypes.c_void_p
    state = ctypes.c_void_p(api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Main())))
    count = 0
    while state:
        count += 1
        state = ctypes.c_void_p(api.PyThreadState_Next(state))
    return count


@pytest.fixture
def patient_interpreter() -> Iterator[None]:
    """Whoever holds the interpreter's lock keeps it, so that a thread that wants it can be seen waiting."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("patient_interpreter")
def test_no_thread_of_the_runtime_wants_the_interpreter_after_a_step() -> None:
    runner = build_runner(tiny_checkpoint("llama"), tiny_options(decode_sequences=(1,), prefill_tokens=(8,)))
    runner.bind(ArenaSpec(NUM_PAGES, runner.config.geometry.page_bytes, runner.config.arena_dtype))
    builder = builder_for(runner)
    plan = builder.prefill([(builder.sequence(0, [1, 2, 3]), 3)])
    runner.forward(plan)
    before, late = threads_in_the_interpreter(), 0
    for _ in range(80):
        runner.forward(plan)
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        late += threads_in_the_interpreter() > before
    assert late == 0


class Result:
    """A device array that notes what is done with it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    def copy_to_host_async(self) -> None:
        self.calls.append("copy")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.calls.append("wait")
        if self._error is not None:
            raise self._error
        return np.zeros(1)


def results(*errors: Exception | None) -> Any:
    return [Result(error) for error in errors]


def calls(results: Sequence[Result]) -> list[list[str]]:
    return [result.calls for result in results]


def test_settling_waits_for_every_result_that_nobody_read() -> None:
    state = DeviceState(is_host=False)
    read, unread, failed = results(None, None), results(None, None), results(RuntimeError("lost"), None)
    for sent in (read, unread, failed):
        state.send(sent)
    state.forget(read)
    state.settle()
    assert calls(read) == [["copy"]] * 2
    assert calls(unread) == calls(failed) == [["copy", "wait"]] * 2
    state.settle()
    assert calls(unread) == [["copy", "wait"]] * 2, "once is enough"


def test_results_in_the_hosts_memory_are_not_copied() -> None:
    state = DeviceState(is_host=True)
    sent = results(None)
    state.send(sent)
    state.settle()
    assert calls(sent) == [["wait"]]


def test_results_that_nobody_reads_do_not_pile_up() -> None:
    state = DeviceState(is_host=True)
    sent = [results(None) for _ in range(200)]
    for one in sent:
        state.send(one)
    state.settle()
    assert calls(sent[-1]) == [["wait"]] and calls(sent[0]) == [[]]


def test_a_runner_that_is_dropped_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    monkeypatch.setattr(DeviceState, "settle", lambda self: settled.append(os.getpid()))
    runner = build_runner(tiny_checkpoint("llama"), tiny_options())
    assert not settled
    del runner
    assert settled == [os.getpid()]
