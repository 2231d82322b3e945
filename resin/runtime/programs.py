"""The compiled programs of one runner: made ahead in parallel threads, or one by one when they are first needed."""

from __future__ import annotations

import time
from concurrent.futures import as_completed

import jax

from resin.models.weights import Progress
from resin.models.workers import worker_pool
from resin.plan import ArenaSpec, Bucket, StepPlan
from resin.runtime.compile_cache import cache_hits
from resin.runtime.executable import StepSpec, compile_load, compile_step
from resin.runtime.ledger import program_temporary_bytes
from resin.runtime.program_cache import ProgramCache
from resin.runtime.program_kind import ProgramKind, step_kind


class Programs:
    """Programs by bucket and kind. Compiled against shapes alone: weights and arena need not exist.

    Attributes:
        kinds: the programs that each bucket has once all are compiled.
        compiled: what exists so far.
        seconds: spent compiling or loading.
    """

    def __init__(self, spec: StepSpec, threads: int, cache: ProgramCache | None = None) -> None:
        self.kinds: dict[Bucket, tuple[ProgramKind, ...]] = {
            bucket: spec.kinds(bucket) for bucket in spec.config.buckets
        }
        self.compiled: dict[tuple[Bucket, ProgramKind], jax.stages.Compiled] = {}
        self.seconds = 0.0
        self._spec = spec
        self._threads = threads
        self._cache = cache
        self._load_slot: jax.stages.Compiled | None = None
        self._arena: ArenaSpec | None = None

    def fit(self, arena: ArenaSpec) -> None:
        """Keeps the programs only if they are for this arena, whose size is part of them."""
        if arena != self._arena:
            self.compiled.clear()
            self._arena = arena

    def compile_all(self, arena: ArenaSpec, progress: Progress | None = None) -> None:
        """Compiles what the bucket table still lacks.

        Args:
            arena: the pool that the programs will get.
            progress: called after each program with its bucket, programs done and programs in all.
        """
        started = time.perf_counter()
        wanted = [(bucket, kind) for bucket, kinds in self.kinds.items() for kind in kinds]
        wanted = [key for key in wanted if key not in self.compiled]
        with worker_pool(self._threads, "resin-compile") as pool:
            load = pool.submit(compile_load, self._spec) if self._load_slot is None else None
            futures = {pool.submit(self._make, bucket, arena, kind): (bucket, kind) for bucket, kind in wanted}
            for done, future in enumerate(as_completed(futures), start=1):
                self.compiled[futures[future]] = future.result()
                if progress is not None:
                    progress(str(futures[future][0]), done, len(wanted))
            if load is not None:
                self._load_slot = load.result()
        self.seconds += time.perf_counter() - started

    def kind(self, step: StepPlan) -> ProgramKind:
        """Which of its bucket's programs runs a step."""
        return step_kind(step, self.kinds[step.bucket])

    def step(self, bucket: Bucket, kind: ProgramKind, arena: ArenaSpec) -> jax.stages.Compiled:
        """One of a bucket's programs, compiled now if it does not exist."""
        program = self.compiled.get((bucket, kind))
        if program is None:
            started = time.perf_counter()
            program = self.compiled[bucket, kind] = self._make(bucket, arena, kind)
            self.seconds += time.perf_counter() - started
        return program

    def _make(self, bucket: Bucket, arena: ArenaSpec, kind: ProgramKind) -> jax.stages.Compiled:
        """Loads a program from disk, or compiles and keeps it."""
        program = self._cache.load(bucket, kind, arena) if self._cache is not None else None
        if program is None:
            before = cache_hits()
            program = compile_step(self._spec, bucket, arena, kind)
            # What XLA's cache gave cannot be written again: a copy loads on CPU, and misses functions when it runs.
            if self._cache is not None and cache_hits() == before:
                self._cache.save(bucket, kind, arena, program)
        return program

    def load_slot(self) -> jax.stages.Compiled:
        """The program that fills a slot."""
        if self._load_slot is None:
            self._load_slot = compile_load(self._spec)
        return self._load_slot

    @property
    def count(self) -> int:
        """Programs that exist, the one that fills slots included."""
        return len(self.compiled) + (self._load_slot is not None)

    @property
    def largest_temporary_bytes(self) -> int:
        """The most that any of them needs beside its arguments."""
        return max(map(program_temporary_bytes, self.compiled.values()), default=0)
