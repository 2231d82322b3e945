"""A runner serves one engine after another, whatever became of the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resin import Engine, EngineFailed, InvalidRequest, SamplingParams
from resin.runtime import ModelRunner, build_runner
from tests.runtime.tiny_runner import reference_greedy, tiny_checkpoint, tiny_options

PROMPT = [5, 9, 2]
GREEDY = SamplingParams(max_output_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner(tiny_checkpoint("llama"), tiny_options(decode_sequences=(4,), prefill_tokens=(8,)))


def generate(engine: Engine) -> list[int]:
    request = engine.submit(PROMPT, sampling_params=GREEDY)
    while engine.has_work():
        engine.step()
    return request.take_result()


def refused(**settings: object) -> Callable[[ModelRunner], None]:
    def attempt(runner: ModelRunner) -> None:
        with pytest.raises((InvalidRequest, OSError)):
            Engine(runner, **settings)  # type: ignore[arg-type]

    return attempt


def closed_with_work(runner: ModelRunner) -> None:
    with Engine(runner) as engine:
        engine.submit(PROMPT, sampling_params=GREEDY)
        engine.step()


def closed_by_an_exception(runner: ModelRunner) -> None:
    with pytest.raises(KeyError), Engine(runner) as engine:
        engine.submit(PROMPT, sampling_params=GREEDY)
        engine.step()
        raise KeyError


def quarantined(runner: ModelRunner) -> None:
    """A program that fails after arena and slots were donated to it."""
    engine = Engine(runner)
    engine.submit(PROMPT, sampling_params=GREEDY)
    engine.step()
    assert runner._state.arena is not None
    runner._state.arena.delete()
    with pytest.raises(EngineFailed, match="quarantined"):
        while engine.has_work():
            engine.step()


@pytest.mark.parametrize(
    "before",
    [
        refused(cache_pages=3),
        refused(cache_pages=1),
        refused(context_length=1),
        refused(overlap=9),
        refused(record=Path("/nowhere/recording")),
        closed_with_work,
        closed_by_an_exception,
        quarantined,
    ],
    ids=["few pages", "no pages", "context", "overlap", "record", "closed", "exception", "quarantined"],
)
def test_the_next_engine_gets_the_runner(runner: ModelRunner, before: Callable[[ModelRunner], None]) -> None:
    before(runner)
    with Engine(runner) as engine:
        assert generate(engine) == reference_greedy("llama", PROMPT, 4)


def test_a_runner_has_one_engine_at_a_time(runner: ModelRunner) -> None:
    with Engine(runner) as engine:
        with pytest.raises(InvalidRequest, match="close its engine"):
            Engine(runner)
        assert generate(engine) == reference_greedy("llama", PROMPT, 4), "the refused one took nothing away"
    for call in (engine.step, lambda: engine.submit(PROMPT)):
        with pytest.raises(EngineFailed, match="closed"):
            call()
    assert not engine.has_work()


def test_programs_serve_arenas_of_one_size(runner: ModelRunner) -> None:
    with Engine(runner) as engine:
        generate(engine)
    programs = dict(runner._programs.compiled)
    with Engine(runner) as engine:
        assert generate(engine) == reference_greedy("llama", PROMPT, 4)
    assert programs and runner._programs.compiled == programs
    with Engine(runner, cache_pages=50) as engine:
        assert generate(engine) == reference_greedy("llama", PROMPT, 4)
    assert runner._programs.compiled.keys() == programs.keys()
    assert all(runner._programs.compiled[key] is not program for key, program in programs.items())


def test_unbinding_gives_the_memory_back(runner: ModelRunner) -> None:
    with Engine(runner) as engine:
        generate(engine)
        arena, slots = runner._state.arena, runner._state.slots
        assert arena is not None and slots is not None
    assert runner._state.arena is None and runner._state.slots is None and runner._state.no_masks is None
    assert arena.is_deleted() is False, "others may still look at it"
