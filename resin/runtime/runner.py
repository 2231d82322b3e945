"""ModelRunner: executes plans on the devices of one process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from resin.models.weights import AbstractModel, Progress
from resin.plan import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    InvalidRequest,
    PlanRejected,
    RunnerConfig,
    StepPlan,
    StepTimes,
)
from resin.runtime.arena import DeviceState, allocate, place
from resin.runtime.executable import OF_REPLICAS, StepOutput, StepSpec, abstract_arena
from resin.runtime.ledger import MemoryLedger
from resin.runtime.masks import blocks_of, check_masks, no_masks
from resin.runtime.measure import measure_steps
from resin.runtime.memory import Memory
from resin.runtime.mesh import local_device
from resin.runtime.program_cache import ProgramCache
from resin.runtime.program_kind import ProgramKind
from resin.runtime.programs import Programs
from resin.runtime.results import StepHandle
from resin.runtime.slots import load_steps
from resin.runtime.special import mask_blocks
from resin.runtime.view import RunnerView

WeightLoader = Callable[[Progress | None], tuple[jax.Array, ...]]
"""Puts the weights on the devices; called once, when the memory ledger holds."""


class ModelRunner:
    """Runs one model; not thread-safe.

    Life: construct (nothing is on the devices), `bind`, `warm_up`, then `dispatch` and `collect` (or `forward`, which
    is both), `unbind`, and then perhaps `bind` again. Without `warm_up` a program is compiled when a plan needs it.
    Plans execute in dispatch order. What is in flight when the runner is dropped or the interpreter ends is waited for.

    Args:
        spec: structure, config, mesh.
        load_weights: puts the weights on the devices, in the order of `model.declarations`.
        model_config, tokenizer, eos_token_ids: kept as attributes.
        cache_bytes: size of the arena; None takes a share of free memory.
        compile_threads: buckets compiled at once; None takes the CPU count, at most 8.
        program_cache: where programs are kept between processes; None for nowhere.

    Attributes:
        config: what the Engine plans within.
        tokenizer: ChatTokenizer of the checkpoint, or None.
        eos_token_ids: ids that end a turn by the checkpoint's own account.
        ledger: memory use, known once programs are compiled.
    """

    def __init__(
        self,
        spec: StepSpec,
        load_weights: WeightLoader,
        *,
        model_config: Any = None,
        tokenizer: Any = None,
        eos_token_ids: tuple[int, ...] = (),
        cache_bytes: int | None = None,
        compile_threads: int | None = None,
        program_cache: ProgramCache | None = None,
    ) -> None:
        self.config: RunnerConfig = spec.config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.ledger: MemoryLedger | None = None
        self._spec = spec
        self._load_weights = load_weights
        self._weights: tuple[jax.Array, ...] | None = None
        self._programs = Programs(spec, compile_threads or min(os.cpu_count() or 1, 8), program_cache)
        self._memory = Memory(spec, self._programs, cache_bytes)
        self._arena_spec: ArenaSpec | None = None
        self._state = DeviceState(is_host=self.device.platform == "cpu")
        weakref.finalize(self, self._state.settle)
        self._programs_when_ready: int | None = None
        self._step_times: StepTimes | None = None

    @property
    def device(self) -> jax.Device:
        """The first device of the mesh that this process drives."""
        return local_device(self._spec.mesh)

    @property
    def dtype(self) -> str:
        """Dtype of activations, and of weights that have none of their own."""
        return self._spec.dtype

    @property
    def model(self) -> AbstractModel:
        """Structure and declarations of the weights."""
        return self._spec.model

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The flat weights, in the order of `model.declarations`; loads them if nothing has yet."""
        if self._weights is None:
            self._memory.account(0).check()
            return self._take_weights(None)
        return self._weights

    def free_pages(self) -> int:
        """Pages that fit: what the options say, else a share of the memory that weights and slots leave.

        The Engine takes all of them for a prefix cache, and what its sequences can fill without one.

        Raises:
            InvalidRequest: they leave none.
        """
        return self._memory.free_pages()

    def bind(self, arena: ArenaSpec) -> None:
        """Fixes the arena's size; memory is taken at warm-up, once the ledger holds.

        Raises:
            InvalidRequest: bound already, a page size or dtype that is not the config's, no usable page, or more than
                the device has room for beside the weights, even without temporaries.
        """
        if self._arena_spec is not None:
            raise InvalidRequest("arena", arena, "a runner that is not bound: close its engine, or unbind it, first")
        self._memory.check_arena(arena)
        self._programs.fit(arena)
        self._arena_spec = arena

    def unbind(self) -> None:
        """Waits for what is in flight and gives back arena and slot table; another `bind` may follow.

        Weights stay, and so do programs, which serve the next arena if it is of the same size.
        """
        self._state.release()
        self._arena_spec = self._programs_when_ready = None

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles every bucket in parallel and proves that memory suffices. Neither weights nor arena are needed.

        Args:
            progress: called after each program with its bucket, programs done and programs in all.

        Raises:
            InvalidRequest: not bound, or the ledger exceeds the device's memory.
        """
        arena = self._bound_arena()
        self._programs.compile_all(arena, progress)
        self._prove(arena)

    def warm_up(self, progress: Progress | None = None, *, measures: bool = True) -> None:
        """`compile`, then loads the weights and allocates, and measures what steps without a row take.

        Args:
            progress: as for `compile`, then called while weights load with (what, bytes done, bytes in all).
            measures: False does not measure.

        Raises:
            InvalidRequest: not bound, or the ledger exceeds the device's memory: nothing was loaded or allocated.
            CheckpointError: the weights cannot be read.
        """
        self.compile(progress)
        self._allocate(progress)
        self._step_times = measure_steps(self.config, self.launch, self.forward) if measures else None
        self._programs_when_ready = self._programs.count

    def _bound_arena(self) -> ArenaSpec:
        if self._arena_spec is None:
            raise InvalidRequest("arena", None, "bind() before the first step")
        return self._arena_spec

    def _prove(self, arena: ArenaSpec) -> None:
        """Holds the ledger against the device's memory, as long as the arena is not allocated."""
        if self._state.arena is None:
            self.ledger = self._memory.account(arena.total_bytes)
            self.ledger.check()

    def _take_weights(self, progress: Progress | None) -> tuple[jax.Array, ...]:
        self._weights = self._load_weights(progress)
        self._memory.has_weights = True
        return self._weights

    def _allocate(self, progress: Progress | None = None) -> None:
        """Loads weights and takes arena, slots and masks, if that has not happened."""
        if self._state.arena is not None:
            return
        arena, mesh = self._bound_arena(), self._spec.mesh
        self._prove(arena)
        if self._weights is None:
            self._take_weights(progress)
        state, sharding = self._state, jax.sharding.NamedSharding(mesh, OF_REPLICAS)
        state.no_masks = place(np.tile(no_masks(self.config), (self.config.replicas, 1)), sharding)
        state.slots = allocate(self._spec.slots())
        state.arena = allocate(abstract_arena(arena, mesh))

    def accept(self, plan: BatchPlan | StepPlan) -> None:
        """Refuses a plan that no program can run.

        Raises:
            PlanRejected: unknown bucket, masks of a wrong shape, or plans of another number of replicas.
        """
        step = StepPlan.of(plan)
        if len(step.plans) != self.config.replicas:
            raise PlanRejected(f"{len(step.plans)} plans, expected one for each of {self.config.replicas} replicas")
        if step.bucket not in self.config.buckets:
            raise PlanRejected(f"bucket {step.bucket} is not in the table")
        for each in step.plans:
            check_masks(each, self.config)

    def dispatch(self, plan: BatchPlan | StepPlan) -> StepHandle:
        """Starts the plan of the only replica, or of all; returns as soon as the devices have it.

        Raises:
            InvalidRequest: not bound.
        """
        handle = StepHandle.of(StepPlan.of(plan), self.launch(plan))
        self._state.send(handle.results)
        return handle

    def launch(self, plan: BatchPlan | StepPlan) -> StepOutput:
        """Starts a plan and leaves its results on the device: `dispatch` without the copies to the host."""
        step, state = StepPlan.of(plan), self._state
        kind = self._programs.kind(step)
        program = self._program(step.bucket, kind)
        for arguments in load_steps([each.slot_loads for each in step.plans], self.config):
            state.slots = self._programs.load_slot()(state.slots, *arguments)
        masks = blocks_of(step, mask_blocks(kind.special_counts(step.bucket)[-1]), state.no_masks)
        state.arena, state.slots, output = program(self._weights, state.arena, state.slots, step.buffer, masks)
        return output

    def executable(self, plan: BatchPlan | StepPlan) -> jax.stages.Compiled:
        """The program that runs a plan: also for its text and its memory analysis."""
        return self._program(plan.bucket, self._programs.kind(StepPlan.of(plan)))

    def _program(self, bucket: Bucket, kind: ProgramKind) -> jax.stages.Compiled:
        program = self._programs.step(bucket, kind, self._bound_arena())
        self._allocate()
        return program

    def replace_arena(self, change: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces the arena by what `change` makes of it, which should donate it: benchmarks fill it with noise."""
        self._allocate()
        assert self._state.arena is not None
        self._state.arena = change(self._state.arena)

    def collect(self, handle: StepHandle) -> Any:
        """Waits for the results: a ForwardOutput, or one of each replica where there are several."""
        outputs = handle.read()
        self._state.forget(handle.results)
        return outputs if self.config.replicas > 1 else outputs[0]

    def forward(self, plan: BatchPlan | StepPlan) -> Any:
        """`dispatch`, then `collect`."""
        return self.collect(self.dispatch(plan))

    def view(self, **changes: Any) -> RunnerView:
        """The runner as engines may bind it one after another while it stays bound, with changes of its config.

        Raises:
            InvalidRequest: not bound.
        """
        return RunnerView(self, self._bound_arena(), **changes)

    def step_times(self) -> StepTimes | None:
        """What steps take, as measured at warm-up."""
        return self._step_times

    def facts(self) -> Mapping[str, str]:
        """What the runner runs with, in words."""
        return self._spec.facts()

    def observations(self) -> Mapping[str, float]:
        """Numbers for the metrics page."""
        ledger, when_ready = self.ledger, self._programs_when_ready
        late = 0 if when_ready is None else self._programs.count - when_ready
        return {
            "executables": float(len(self._programs.compiled)),
            "compile_seconds": self._programs.seconds,
            "compilations_after_ready": float(late),
            "weight_bytes": float(ledger.weights if ledger else self._spec.model.device_nbytes(self._spec.mesh)),
            "arena_bytes": float(ledger.arena if ledger else 0),
            "largest_temporary_bytes": float(ledger.largest_temporary if ledger else 0),
        }
