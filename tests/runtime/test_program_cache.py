"""Programs on disk: a second start compiles nothing, and whatever could change a program changes its key."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from resin import ArenaSpec, Engine, SamplingParams
from resin.models.llama import Llama
from resin.runtime import build_runner, compile_cache, load, program_cache, programs
from resin.runtime.program_cache import ProgramCache
from resin.runtime.program_kind import ProgramKind
from tests.runtime.tiny_runner import NUM_PAGES, reference_greedy, tiny_checkpoint, tiny_options

SIZES = {"decode_sequences": (4,), "prefill_tokens": (32,)}


def make(directory: Path, family: str = "llama", **changes) -> Engine:
    """An engine whose runner is warm and keeps its programs in the directory, whatever XLA's cache holds."""
    options = tiny_options(compile_cache=directory, compile_cache_bytes=1 << 30, **(SIZES | changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "use_compile_cache", lambda directory, max_bytes: True)  # it is the whole process's
        runner = build_runner(tiny_checkpoint(family), options)
    engine = Engine(runner, cache_pages=NUM_PAGES)
    held = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        runner.warm_up()
    finally:
        jax.config.update("jax_compilation_cache_dir", held)
        compilation_cache.reset_cache()
    return engine


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    """A directory after the first start, and its engine."""
    directory = tmp_path_factory.mktemp("programs")
    return directory, make(directory)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch):
    def forbid():
        def refuse(*args: object) -> None:
            raise AssertionError("a program was compiled")

        monkeypatch.setattr(programs, "compile_step", refuse)

    return forbid


def greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    request = engine.submit(prompt, sampling_params=SamplingParams(max_output_tokens=count, temperature=0))
    while not request.is_finished:
        engine.step()
    return list(request.output_ids)


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "steps").glob("*.program"))


def check_second_start(directory: Path, no_compiler, family: str, tp: int) -> None:
    assert len(kept(directory)) == 2
    no_compiler()
    engine = make(directory, family, tp=tp)
    runner = engine.runner
    assert runner.ledger is not None and runner.ledger.largest_temporary > 0
    prompt = np.random.default_rng(0).integers(3, 256, 21).tolist()
    assert greedy(engine, prompt, 4) == reference_greedy(family, prompt, 4)
    assert runner.observations()["compilations_after_ready"] == 0


def test_a_second_start_compiles_nothing_and_computes_the_same(first, no_compiler) -> None:
    check_second_start(first[0], no_compiler, "llama", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [("lfm2", 1), ("gemma3_text", 1), ("llama", 2)])
def test_so_does_every_kind_of_model(tmp_path: Path, no_compiler, family: str, tp: int) -> None:
    make(tmp_path, family, tp=tp)
    check_second_start(tmp_path, no_compiler, family, tp)


def test_a_file_that_cannot_be_read_is_made_again(first, no_compiler, tmp_path: Path) -> None:
    shutil.copytree(first[0] / "steps", tmp_path / "steps")
    torn = kept(tmp_path)[0]
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    make(tmp_path)
    no_compiler()
    make(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"cache_dtype": "bfloat16"},
        {"max_sequences": 3},
        {"page_tokens": 8},
        {"max_context_tokens": 96},
        {"kernels": "interpret"},
        {"kv_dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_other_options_are_other_programs(first, changes: dict) -> None:
    directory, engine = first
    config = engine.runner.model_config
    spec = load.build_spec(Llama, config, tiny_options(**(SIZES | changes)), engine.runner._spec.mesh)
    cache = ProgramCache.of(directory / "steps", 1, Llama, config, spec)
    assert cache is not None
    arena = ArenaSpec(NUM_PAGES, spec.config.geometry.page_bytes, spec.config.arena_dtype)
    paths = {cache._path(bucket, kind, arena) for bucket in spec.config.buckets for kind in spec.kinds(bucket)}
    assert paths and paths.isdisjoint(kept(directory))


def test_other_sources_versions_flags_and_arenas_are_other_programs(first, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, engine = first
    runner = engine.runner
    spec, arena = runner._spec, runner._bound_arena()
    bucket = spec.config.buckets[0]

    def path(arena: ArenaSpec = arena, config: object = runner.model_config) -> Path:
        cache = ProgramCache.of(directory / "steps", 1, Llama, config, spec)
        assert cache is not None
        return cache._path(bucket, spec.kinds(bucket)[0], arena)

    here = path()
    assert here in kept(directory)
    assert path(replace(arena, num_pages=arena.num_pages + 1)) != here
    assert path(config=replace(runner.model_config, norm_eps=1e-3)) != here
    with monkeypatch.context() as changed:
        changed.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=false")
        assert path() != here
    with monkeypatch.context() as changed:
        changed.setattr(program_cache, "source_digest", lambda: "edited")
        assert path() != here
    with monkeypatch.context() as changed:
        changed.setattr(program_cache.metadata, "version", lambda name: "0.0")
        assert path() != here


def test_models_from_elsewhere_are_not_kept(first, tmp_path: Path) -> None:
    class Edited(Llama):
        """Its source is not this package's."""

    runner = first[1].runner
    assert ProgramCache.of(tmp_path, 1, Edited, runner.model_config, runner._spec) is None


def test_programs_used_longest_ago_go_first(first, tmp_path: Path) -> None:
    shutil.copytree(first[0] / "steps", tmp_path / "steps")
    old, new = kept(tmp_path)
    os.utime(old, (1, 1))
    cache = ProgramCache(tmp_path / "steps", new.stat().st_size, "", ())
    cache._trim()
    assert kept(tmp_path) == [new]
    cache._trim()
    assert kept(tmp_path) == [new]


def test_a_directory_that_cannot_be_written_costs_the_cache_alone(first, tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("a file stands where the directory should be")
    runner = first[1].runner
    cache = ProgramCache.of(tmp_path / "steps", 1 << 30, Llama, runner.model_config, runner._spec)
    assert cache is not None
    (bucket, kind), program = next(iter(runner._programs.compiled.items()))
    cache.save(bucket, kind, runner._bound_arena(), program)
    assert cache.load(bucket, kind, runner._bound_arena()) is None


def test_what_xlas_cache_gave_is_not_kept(first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy would load and fail when it runs."""
    runner = first[1].runner
    bucket, kind = next(iter(runner._programs.compiled))

    def compile_step(*args: object) -> jax.stages.Compiled:
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return runner._programs.compiled[bucket, kind]

    monkeypatch.setattr(programs, "compile_step", compile_step)
    cache = ProgramCache.of(tmp_path / "steps", 1 << 30, Llama, runner.model_config, runner._spec)
    programs.Programs(runner._spec, 1, cache)._make(bucket, runner._bound_arena(), kind)
    assert not kept(tmp_path)


def test_a_disk_that_cannot_be_written_is_said_and_harms_nothing(
    first: tuple[Path, Engine], no_compiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = first
    cache = engine.runner._programs._cache
    bucket, arena = engine.config.buckets[0], engine.arena
    program = cache.load(bucket, ProgramKind.ANY, arena)
    assert program is not None

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    compile_cache.warn_not_kept.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(program_cache.os, "replace", full)
        for _ in range(3):
            cache.save(bucket, ProgramKind.ANY, arena, program)
    with monkeypatch.context() as patch:
        patch.setattr(program_cache.os, "utime", full)
        assert cache.load(bucket, ProgramKind.ANY, arena) is not None
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled programs are not kept in {cache.directory}: No space left on device"
    ]


@pytest.mark.parametrize("fault", ["a file in the way", "a full disk"])
def test_a_place_that_takes_no_programs_is_said_once(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = jax.config.jax_compilation_cache_dir
    place = tmp_path / "programs"
    if fault == "a file in the way":
        place.write_text("")
        reason = "File exists"
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=2_500_000)
        monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda path: usage)
        reason = "the disk has only 2.5 MB left"
    options = tiny_options(compile_cache=place, compile_cache_bytes=1 << 30)
    compile_cache.warn_not_kept.cache_clear()
    for _ in range(2):
        build_runner(tiny_checkpoint("llama"), options)
    assert [record.getMessage() for record in caplog.records] == [
        f"compiled programs are not kept in {place}: {reason}"
    ]
    assert jax.config.jax_compilation_cache_dir == held
