"""A view lets engines come and go while the runner stays bound."""

from __future__ import annotations

import pytest

from resin import ArenaSpec, Engine, InvalidRequest, Phase
from resin.plan import RunnerParts
from resin.runtime import build_runner
from tests.runtime.tiny_runner import tiny_checkpoint, tiny_options


def test_engines_of_a_view_leave_the_runner_bound() -> None:
    runner = build_runner(tiny_checkpoint("llama"), tiny_options())
    with pytest.raises(InvalidRequest, match="arena"):
        runner.view()
    arena = ArenaSpec(40, runner.config.geometry.page_bytes, runner.config.arena_dtype)
    runner.bind(arena)
    fewer = [bucket for bucket in runner.config.buckets if bucket.phase is Phase.DECODE or bucket.tokens == 32]
    for pages in (None, 12, 40):
        with Engine(runner.view(buckets=tuple(fewer), max_sequences=2, max_penalised=2), cache_pages=pages) as engine:
            assert engine.config.buckets == tuple(fewer) and engine.config.max_sequences == 2
            assert engine.arena.num_pages == (pages or 1 + 2 * 8), "two sequences of 128 tokens"
            assert engine.parts.accept == runner.accept
    with pytest.raises(InvalidRequest, match="at most 40"):
        Engine(runner.view(), cache_pages=41)
    with pytest.raises(InvalidRequest, match="not bound"):
        runner.bind(arena)
    assert RunnerParts.of(runner.view()).free_pages is not None and runner.config.max_sequences == 4
