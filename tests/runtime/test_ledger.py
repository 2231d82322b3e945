"""The memory ledger: what does not fit is refused before weights are read and the arena is taken."""

from __future__ import annotations

import numpy as np
import pytest

from resin import Engine
from resin.models.loading.checkpoint import CheckpointError, Window
from resin.models.testing import MemoryCheckpoint
from resin.plan import ArenaSpec, InvalidRequest
from resin.runtime import ModelRunner, build_runner
from tests.runtime.tiny_runner import builder_for, tiny_checkpoint, tiny_options


class CountingCheckpoint(MemoryCheckpoint):
    """Counts what is read of it."""

    reads = 0

    def read(self, name: str, window: Window = ()) -> np.ndarray:
        self.reads += 1
        return super().read(name, window)


def counting_runner(**changes: object) -> tuple[CountingCheckpoint, ModelRunner]:
    held = tiny_checkpoint("llama")
    checkpoint = CountingCheckpoint(held.config, held.arrays)
    options = tiny_options(decode_sequences=(1,), prefill_tokens=(8,), **changes)
    return checkpoint, build_runner(checkpoint, options)


def test_what_does_not_fit_is_refused_before_anything_is_loaded_or_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, runner = counting_runner()
    page_bytes = runner.config.geometry.page_bytes
    runner.bind(ArenaSpec(64, page_bytes, runner.config.arena_dtype))
    runner.compile()
    assert runner.ledger is not None and runner.ledger.largest_temporary > 0
    limit = runner.ledger.total - 1
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: limit)
    monkeypatch.setattr("resin.runtime.runner.allocate", lambda abstract: pytest.fail("allocated"))
    terms = r"weights .* MB, arena .* MB, slots .* MB, largest temporary .* MB, total .* MB, limit .* MB"
    for attempt in (runner.warm_up, runner.compile):
        with pytest.raises(InvalidRequest, match=terms):
            attempt()
    with pytest.raises(InvalidRequest, match=terms):
        runner.forward(builder_for(runner).prefill([(builder_for(runner).sequence(0, [5]), 1)]))
    assert checkpoint.reads == 0


def test_an_arena_that_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = counting_runner()
    arena = ArenaSpec(64, runner.config.geometry.page_bytes, runner.config.arena_dtype)
    held = runner._memory.account(0).total
    for limit, field in ((held - 1, "model='0.* MB'"), (held + arena.total_bytes - 1, "cache_bytes=")):
        monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device, limit=limit: limit)
        with pytest.raises(InvalidRequest, match=field):
            runner.bind(arena)
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: held + arena.total_bytes)
    runner.bind(arena)


def test_weights_that_leave_no_room_for_a_page_are_refused_when_the_arena_is_sized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, runner = counting_runner()
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: 100_000)
    for attempt in (lambda: Engine(runner), lambda: runner.weights):
        with pytest.raises(InvalidRequest, match=r"weights 0\.\d MB, arena .* limit 0\.1 MB"):
            attempt()
    assert checkpoint.reads == 0


def test_the_arena_takes_its_share_of_what_weights_will_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, runner = counting_runner(max_sequences=64, max_context_tokens=256)
    page_bytes, weights = runner.config.geometry.page_bytes, runner.model.nbytes
    room = 100 * page_bytes
    before = runner.free_pages()
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: weights + room)
    cold = runner.free_pages()
    assert cold < 50 < before
    assert len(runner.weights) and checkpoint.reads > 0
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: room)
    assert runner.free_pages() == cold


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cache"])
def test_a_prefix_cache_takes_the_memory_that_sequences_alone_would_not(
    prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner = counting_runner(max_sequences=2, max_context_tokens=64)
    page_bytes = runner.config.geometry.page_bytes
    room = 4000 * page_bytes
    monkeypatch.setattr("resin.runtime.memory.device_limit_bytes", lambda device: runner.model.nbytes + room)
    fits = runner.free_pages()
    engine = Engine(runner, prefix_cache=prefix_cache)
    whole = engine.scheduler.replicas[0].cache.pages_needed(64, runner.config.max_plan_tokens)
    assert 1500 < fits < 4000 and 2 * whole < 200
    assert engine.arena.num_pages == (fits if prefix_cache else 1 + 2 * whole)
    _, bounded = counting_runner(max_sequences=2, max_context_tokens=64, cache_bytes=300 * page_bytes)
    assert Engine(bounded, prefix_cache=True).arena.num_pages == 300, "the option is the bound"


def test_an_arena_never_outgrows_its_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = counting_runner(max_sequences=2, max_context_tokens=64)
    monkeypatch.setattr("resin.runtime.memory.MAX_ARENA_ROWS", 10_000)
    most = runner.free_pages()
    with pytest.raises(InvalidRequest, match="num_pages"):
        Engine(runner, cache_pages=most + 1)
    assert Engine(runner, prefix_cache=True).arena.num_pages == most


def test_a_checkpoint_that_does_not_fit_the_model_is_refused_before_compiling() -> None:
    held = tiny_checkpoint("llama")
    arrays = {name: array for name, array in held.arrays.items() if "layers.1.mlp" not in name}
    with pytest.raises(CheckpointError, match=r"missing .*layers\.1\.mlp"):
        build_runner(MemoryCheckpoint(held.config, arrays), tiny_options())
