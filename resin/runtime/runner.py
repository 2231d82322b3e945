"""ModelRunner: executes plans on the devices of one process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from resin.models.weights import AbstractModel, Progress
from resin.plan import (
    ArenaSpec,
    BatchPlan,
    ForwardOutput,
    InvalidRequest,
    Phase,
    PlanRejected,
    RowFlag,
    RunnerConfig,
    StepTimes,
)
from resin.plan.layout import HEADER
from resin.plan.output import DRAFT_REPORT
from resin.runtime.arena import DeviceState, allocate
from resin.runtime.executable import REPLICATED, StepOutput, StepSpec, abstract_arena
from resin.runtime.ledger import MemoryLedger, device_limit_bytes
from resin.runtime.measure import measure_steps
from resin.runtime.program_cache import ProgramCache
from resin.runtime.program_kind import ProgramKind
from resin.runtime.programs import Programs
from resin.runtime.slots import abstract_slots, load_arguments
from resin.runtime.special import MASK_ROWS, mask_blocks
from resin.runtime.view import RunnerView

# Share of a GPU's free memory that the arena takes when nothing is said; the rest is for temporaries.
GPU_CACHE_SHARE = 0.9
CPU_CACHE_BYTES = 1 << 30
MAX_ARENA_ROWS = 1 << 31  # of the narrowest plane
_MASK = int(RowFlag.MASK)

WeightLoader = Callable[[Progress | None], tuple[jax.Array, ...]]
"""Puts the weights on the devices; called once, when the memory ledger holds."""


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched plan whose results are on their way to the host.

    Attributes:
        results: the part of the output that the plan's rows asked for.
    """

    plan: BatchPlan
    output: StepOutput
    results: Sequence[jax.Array]


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
        model_config: the model's own Config.
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
        self._cache_bytes = cache_bytes
        self._programs = Programs(spec, compile_threads or min(os.cpu_count() or 1, 8), program_cache)
        self._arena_spec: ArenaSpec | None = None
        self._state = DeviceState(is_host=self.device.platform == "cpu")
        weakref.finalize(self, self._state.settle)
        self._programs_when_ready: int | None = None
        self._step_times: StepTimes | None = None

    @property
    def device(self) -> jax.Device:
        """The first device of the mesh."""
        return self._spec.mesh.devices.flat[0]

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
            self._account(0).check()
            self._weights = self._load_weights(None)
        return self._weights

    def free_pages(self) -> int:
        """Pages that fit: what the options say, else a share of the memory that weights and slots leave.

        The Engine takes all of them for a prefix cache, and what its sequences can fill without one.

        Raises:
            InvalidRequest: they leave none.
        """
        page_bytes = self.config.geometry.page_bytes
        if page_bytes == 0:
            return 0
        if self._cache_bytes is not None:
            return self._cache_bytes // page_bytes
        least = self._account(2 * page_bytes)
        least.check()
        free = least.limit - least.weights - least.slots
        share = min(CPU_CACHE_BYTES, free // 2) if self.device.platform == "cpu" else int(free * GPU_CACHE_SHARE)
        return min(share // page_bytes, self._most_pages)

    @property
    def _most_pages(self) -> int:
        """Pages that 32-bit row indices reach."""
        return (MAX_ARENA_ROWS - 1) // (self.config.geometry.page_bytes // self._narrowest_vector_bytes)

    @property
    def _narrowest_vector_bytes(self) -> int:
        dtype = self.config.arena_dtype
        return min(plane.vector_bytes(dtype) for group in self.config.groups for plane in group.planes)

    def bind(self, arena: ArenaSpec) -> None:
        """Fixes the arena's size; memory is taken at warm-up, once the ledger holds.

        Raises:
            InvalidRequest: bound already, a page size or dtype that is not the config's, no usable page, or more than
                the device has room for beside the weights, even without temporaries.
        """
        if self._arena_spec is not None:
            raise InvalidRequest("arena", arena, "a runner that is not bound: close its engine, or unbind it, first")
        expected = (self.config.geometry.page_bytes, self.config.arena_dtype)
        if (arena.page_bytes, arena.dtype) != expected:
            raise InvalidRequest("arena", arena, f"page_bytes and dtype {expected}")
        if arena.num_pages < 2:
            raise InvalidRequest("num_pages", arena.num_pages, "at least 2: page 0 is scratch")
        if self.config.groups and arena.num_pages > self._most_pages:
            row = self._narrowest_vector_bytes
            raise InvalidRequest("num_pages", arena.num_pages, f"fewer than 2^31 rows of {row} bytes")
        self._account(arena.total_bytes).check()
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

    def warm_up(self, progress: Progress | None = None) -> None:
        """`compile`, then loads the weights and allocates, and measures what steps without a row take.

        Args:
            progress: as for `compile`, then called while weights load with (what, bytes done, bytes in all).

        Raises:
            InvalidRequest: not bound, or the ledger exceeds the device's memory: nothing was loaded or allocated.
            CheckpointError: the weights cannot be read.
        """
        self.compile(progress)
        self._allocate(progress)
        self._step_times = measure_steps(self.config, self.launch, self.forward)
        self._programs_when_ready = self._programs.count

    def _bound_arena(self) -> ArenaSpec:
        if self._arena_spec is None:
            raise InvalidRequest("arena", None, "bind() before the first step")
        return self._arena_spec

    def _account(self, arena_bytes: int) -> MemoryLedger:
        """The ledger of an arena of this size and the programs that exist."""
        mesh = self._spec.mesh
        slots = abstract_slots(self.config, jax.sharding.NamedSharding(mesh, REPLICATED), self._spec.drafter)
        masks = 4 * self._mask_words * MASK_ROWS
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots)) + masks
        weights = self._spec.model.device_nbytes(mesh)
        return MemoryLedger(
            weights=weights,
            arena=arena_bytes,
            slots=held,
            largest_temporary=self._programs.largest_temporary_bytes,
            limit=device_limit_bytes(self.device) + (weights if self._weights is not None else 0),
        )

    def _prove(self, arena: ArenaSpec) -> None:
        """Holds the ledger against the device's memory, as long as the arena is not allocated."""
        if self._state.arena is None:
            self.ledger = self._account(arena.total_bytes)
            self.ledger.check()

    def _allocate(self, progress: Progress | None = None) -> None:
        """Loads weights and takes arena, slots and masks, if that has not happened."""
        if self._state.arena is not None:
            return
        arena, mesh = self._bound_arena(), self._spec.mesh
        self._prove(arena)
        if self._weights is None:
            self._weights = self._load_weights(progress)
        replicated = jax.sharding.NamedSharding(mesh, REPLICATED)
        state = self._state
        state.no_masks = jax.device_put(np.zeros((MASK_ROWS, self._mask_words), np.int32), replicated)
        state.slots = allocate(abstract_slots(self.config, replicated, self._spec.drafter))
        state.arena = allocate(abstract_arena(arena, mesh))

    @property
    def _mask_words(self) -> int:
        return -(-self.config.vocab_size // 32)

    def accept(self, plan: BatchPlan) -> None:
        """Refuses a plan that no program can run.

        Raises:
            PlanRejected: unknown bucket, or masks of a wrong shape.
        """
        if plan.bucket not in self.config.buckets:
            raise PlanRejected(f"bucket {plan.bucket} is not in the table")
        masked = len(plan.masked_rows) if plan.buffer[HEADER.any_flags] & _MASK else 0
        expected = (masked, self._mask_words) if masked else None
        shape = None if plan.allowed_masks is None else plan.allowed_masks.shape
        if shape != expected:
            raise PlanRejected(f"allowed_masks has shape {shape}, expected {expected}")

    def dispatch(self, plan: BatchPlan) -> StepHandle:
        """Starts a plan; returns as soon as the device has it.

        Raises:
            InvalidRequest: not bound.
        """
        output = self.launch(plan)
        results = _wanted(plan, output)
        self._state.send(results)
        return StepHandle(plan, output, results)

    def launch(self, plan: BatchPlan) -> StepOutput:
        """Starts a plan and leaves its results on the device: `dispatch` without the copies to the host."""
        kind, state = self._programs.kind(plan), self._state
        program = self._program(plan, kind)
        for load in plan.slot_loads:
            for arguments in load_arguments(load, self.config.vocab_size):
                state.slots = self._programs.load_slot()(state.slots, *arguments)
        masks = self._mask_blocks(plan, mask_blocks(kind.special_counts(plan.bucket)[-1]))
        state.arena, state.slots, output = program(self._weights, state.arena, state.slots, plan.buffer, masks)
        return output

    def _mask_blocks(self, plan: BatchPlan, blocks: int) -> tuple[Any, ...]:
        """The plan's masks in as many blocks as its program takes."""
        masks: list[Any] = []
        if plan.allowed_masks is not None:
            for start in range(0, len(plan.allowed_masks), MASK_ROWS):
                block = plan.allowed_masks[start : start + MASK_ROWS]
                masks.append(block if len(block) == MASK_ROWS else np.pad(block, ((0, MASK_ROWS - len(block)), (0, 0))))
        return (*masks, *[self._state.no_masks] * (blocks - len(masks)))

    def executable(self, plan: BatchPlan) -> jax.stages.Compiled:
        """The program that runs a plan: also for its text and its memory analysis."""
        return self._program(plan, self._programs.kind(plan))

    def _program(self, plan: BatchPlan, kind: ProgramKind) -> jax.stages.Compiled:
        program = self._programs.step(plan.bucket, kind, self._bound_arena())
        self._allocate()
        return program

    def replace_arena(self, change: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces the arena by what `change` makes of it, which should donate it: benchmarks fill it with noise."""
        self._allocate()
        assert self._state.arena is not None
        self._state.arena = change(self._state.arena)

    def collect(self, handle: StepHandle) -> ForwardOutput:
        """Waits for a plan's results."""
        plan, output = handle.plan, handle.output
        counts = plan.emits.astype(np.int32)
        fields: dict[str, np.ndarray] = {}
        if output.drafting is not None:
            drafting = fields["drafting"] = np.asarray(output.drafting)[: plan.num_sequences]
            if plan.bucket.width > 1:
                counts *= 1 + drafting[:, DRAFT_REPORT.agreed]
        indptr = np.zeros(plan.num_sequences + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        emits = np.repeat(np.arange(plan.num_sequences), counts)  # of rows with logprobs each one token
        flags = np.bitwise_or.reduce(plan.row_flags)
        if flags & RowFlag.LOGPROBS:
            assert output.logprobs is not None
            chosen, top_ids, top = (np.asarray(leaf)[emits] for leaf in output.logprobs)
            fields |= {"logprobs": chosen, "top_ids": top_ids, "top_logprobs": top}
        if flags & RowFlag.PROMPT_LOGPROBS and output.prompt is not None:
            chosen, top_ids, top = (np.asarray(leaf)[: plan.num_tokens] for leaf in output.prompt)
            fields |= {"prompt_logprobs": chosen, "prompt_top_ids": top_ids, "prompt_top_logprobs": top}
        for name in ("top_ids", "top_logprobs", "prompt_top_ids", "prompt_top_logprobs"):
            if name in fields:
                fields[name] = fields[name][:, : plan.top_logprobs]
        tokens = np.asarray(output.token_ids)[: plan.num_sequences]
        token_ids = tokens[np.arange(tokens.shape[1])[None, :] < counts[:, None]]
        self._state.forget(handle.results)
        return ForwardOutput(token_ids=token_ids, token_indptr=indptr, **fields)

    def forward(self, plan: BatchPlan) -> ForwardOutput:
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


def _wanted(plan: BatchPlan, output: StepOutput) -> list[jax.Array]:
    """Outputs that this plan's rows asked for; the rest stays on the device."""
    flags = np.bitwise_or.reduce(plan.row_flags)
    leaves = [output.token_ids]
    if output.drafting is not None:
        leaves.append(output.drafting)
    if flags & RowFlag.LOGPROBS:
        assert output.logprobs is not None
        leaves += output.logprobs
    if flags & RowFlag.PROMPT_LOGPROBS and plan.phase is Phase.PREFILL and output.prompt is not None:
        leaves += output.prompt
    return leaves
