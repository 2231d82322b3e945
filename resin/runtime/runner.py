"""ModelRunner: executes plans on the devices of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from resin.models.weights import AbstractModel, Progress
from resin.plan import (
    ArenaSpec,
    BatchPlan,
    Bucket,
    ForwardOutput,
    InvalidRequest,
    Phase,
    PlanRejected,
    RowFlag,
    RunnerConfig,
)
from resin.runtime.arena import allocate
from resin.runtime.executable import (
    REPLICATED,
    SPECIAL,
    StepOutput,
    StepSpec,
    abstract_arena,
    compile_load,
    compile_step,
)
from resin.runtime.ledger import MemoryLedger, device_limit_bytes, program_temporary_bytes
from resin.runtime.slots import SlotTable, abstract_slots, load_arguments

# Share of a GPU's free memory that the arena takes when nothing is said; the rest is for temporaries.
GPU_CACHE_SHARE = 0.9
CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A dispatched plan whose results are on their way to the host."""

    plan: BatchPlan
    output: StepOutput


class ModelRunner:
    """Runs one model; not thread-safe.

    Life: construct (weights are on the devices), `bind` once, `warm_up`, then `dispatch` and `collect` (or `forward`,
    which is both). Plans execute in dispatch order.

    Attributes:
        config: what the Engine plans within.
        model_config: the model's own Config.
        tokenizer: ChatTokenizer of the checkpoint, or None.
        eos_token_ids: ids that end a turn by the checkpoint's own account.
        ledger: memory use, known after `warm_up`.
    """

    def __init__(
        self,
        spec: StepSpec,
        weights: tuple[jax.Array, ...],
        *,
        model_config: Any = None,
        tokenizer: Any = None,
        eos_token_ids: tuple[int, ...] = (),
        cache_bytes: int | None = None,
        compile_threads: int | None = None,
    ) -> None:
        self.config: RunnerConfig = spec.config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.ledger: MemoryLedger | None = None
        self._spec = spec
        self._weights = weights
        self._cache_bytes = cache_bytes
        self._compile_threads = compile_threads or min(os.cpu_count() or 1, 8)
        self._arena_spec: ArenaSpec | None = None
        self._arena: jax.Array | None = None
        self._slots: SlotTable | None = None
        self._programs: dict[tuple[Bucket, bool], jax.stages.Compiled] = {}  # by bucket and whether plain
        self._load_program: jax.stages.Compiled | None = None
        self._masks: dict[int, jax.Array] = {}
        self._ready = False
        self._compilations_after_ready = 0
        self._compile_s = 0.0

    @property
    def device(self) -> jax.Device:
        """The first device of the mesh."""
        return self._spec.mesh.devices.flat[0]

    @property
    def model(self) -> AbstractModel:
        """Structure and declarations of the weights."""
        return self._spec.model

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The flat weights, in the order of `model.declarations`."""
        return self._weights

    def free_pages(self) -> int:
        """Pages that fit: what the options say, else a share of the memory that is free now."""
        page_bytes = self.config.geometry.page_bytes
        if page_bytes == 0:
            return 0
        if self._cache_bytes is not None:
            return self._cache_bytes // page_bytes
        free = device_limit_bytes(self.device)
        share = min(CPU_CACHE_BYTES, free // 2) if self.device.platform == "cpu" else int(free * GPU_CACHE_SHARE)
        # More than every slot at full length is never used.
        most = 1 + self.config.max_sequences * sum(
            fill.pages_per_state * 2 or -(-self.config.max_context_tokens // fill.span_tokens) + 1
            for fill in self.config.geometry.groups
        )
        return min(share // page_bytes, most)

    def bind(self, arena: ArenaSpec) -> None:
        """Fixes the arena's size; memory is taken at warm-up, once the ledger holds.

        Raises:
            InvalidRequest: bound before, a page size or dtype that is not the config's, or no usable page.
        """
        if self._arena_spec is not None:
            raise InvalidRequest("arena", arena, "one bind in the life of a runner")
        expected = (self.config.geometry.page_bytes, self.config.arena_dtype)
        if (arena.page_bytes, arena.dtype) != expected:
            raise InvalidRequest("arena", arena, f"page_bytes and dtype {expected}")
        if arena.num_pages < 2:
            raise InvalidRequest("num_pages", arena.num_pages, "at least 2: page 0 is scratch")
        page_elements = arena.page_bytes // jnp.dtype(arena.dtype).itemsize
        narrowest = min((plane.width for group in self.config.groups for plane in group.planes), default=page_elements)
        if arena.num_pages * (page_elements // narrowest) >= 1 << 31:
            raise InvalidRequest("num_pages", arena.num_pages, f"fewer than 2^31 rows of {narrowest} values")
        self._arena_spec = arena

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every bucket in parallel, proves that memory suffices, allocates, and runs nothing.

        Args:
            progress: called after each program with its bucket, programs done and programs in all.

        Raises:
            InvalidRequest: not bound, or the ledger exceeds the device's memory.
        """
        arena = self._bound_arena()
        started = time.perf_counter()
        wanted = [(bucket, plain) for bucket in self.config.buckets for plain in self._spec.variants]
        wanted = [key for key in wanted if key not in self._programs]
        with ThreadPoolExecutor(self._compile_threads, thread_name_prefix="resin-compile") as pool:
            load = pool.submit(compile_load, self._spec)
            futures = {
                pool.submit(compile_step, self._spec, bucket, arena, plain=plain): (bucket, plain)
                for bucket, plain in wanted
            }
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    self._programs[futures[future]] = future.result()
                    if progress is not None:
                        progress(str(futures[future][0]), done, len(wanted))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            self._load_program = load.result()
        self._compile_s += time.perf_counter() - started
        self._allocate(arena)
        self._ready = True

    def _bound_arena(self) -> ArenaSpec:
        if self._arena_spec is None:
            raise InvalidRequest("arena", None, "bind() before the first step")
        return self._arena_spec

    def _allocate(self, arena: ArenaSpec) -> None:
        if self._arena is not None:
            return
        mesh = self._spec.mesh
        replicated = jax.sharding.NamedSharding(mesh, REPLICATED)
        slots = abstract_slots(self.config.max_sequences, self.config.vocab_size, replicated)
        held = self._spec.model.device_nbytes(mesh)
        self.ledger = MemoryLedger(
            weights=held,
            arena=arena.total_bytes,
            slots=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots)),
            largest_temporary=max(map(program_temporary_bytes, self._programs.values()), default=0),
            limit=device_limit_bytes(self.device) + held,
        )
        self.ledger.check()
        self._arena = allocate(abstract_arena(arena, mesh))
        self._slots = allocate(slots)
        mask_words = -(-self.config.vocab_size // 32)
        sizes = {bucket.sequences for bucket in self.config.buckets}
        self._masks = {
            size: jax.device_put(np.zeros((size, mask_words), np.int32), replicated) for size in sorted(sizes)
        }

    def accept(self, plan: BatchPlan) -> None:
        """Refuses a plan that no program can run.

        Raises:
            PlanRejected: unknown bucket, or masks of a wrong shape.
        """
        if plan.bucket not in self.config.buckets:
            raise PlanRejected(f"bucket {plan.bucket} is not in the table")
        expected = (plan.bucket.sequences, -(-self.config.vocab_size // 32))
        if plan.allowed_masks is not None and plan.allowed_masks.shape != expected:
            raise PlanRejected(f"allowed_masks has shape {plan.allowed_masks.shape}, expected {expected}")

    def dispatch(self, plan: BatchPlan) -> StepHandle:
        """Starts a plan; returns as soon as the device has it.

        Raises:
            InvalidRequest: not bound.
        """
        output = self.launch(plan)
        for leaf in _wanted(plan, output):
            leaf.copy_to_host_async()
        return StepHandle(plan, output)

    def launch(self, plan: BatchPlan) -> StepOutput:
        """Starts a plan and leaves its results on the device: `dispatch` without the copies to the host."""
        program = self._program(plan.bucket, plain=not int(plan.column("header")[2]) & SPECIAL)
        for load in plan.slot_loads:
            for arguments in load_arguments(load, self.config.vocab_size):
                self._slots = self._load_slot(*arguments)
        masks = plan.allowed_masks if plan.allowed_masks is not None else self._masks[plan.bucket.sequences]
        self._arena, self._slots, output = program(self._weights, self._arena, self._slots, plan.buffer, masks)
        return output

    def executable(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program that most steps of a bucket run, for its text and its memory analysis."""
        return self._program(bucket, plain=True)

    def replace_arena(self, change: Callable[[jax.Array], jax.Array]) -> None:
        """Replaces the arena by what `change` makes of it, which should donate it: benchmarks fill it with noise."""
        if self._arena is None:
            self._allocate(self._bound_arena())
        assert self._arena is not None
        self._arena = change(self._arena)

    def collect(self, handle: StepHandle) -> ForwardOutput:
        """Waits for a plan's results."""
        plan, output = handle.plan, handle.output
        emits = np.flatnonzero(plan.emits)
        indptr = np.zeros(plan.num_sequences + 1, np.int32)
        np.cumsum(plan.emits, out=indptr[1:])
        flags = np.bitwise_or.reduce(plan.row_flags)
        fields: dict[str, np.ndarray] = {}
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
        return ForwardOutput(token_ids=np.asarray(output.token_ids)[emits], token_indptr=indptr, **fields)

    def forward(self, plan: BatchPlan) -> ForwardOutput:
        """`dispatch`, then `collect`."""
        return self.collect(self.dispatch(plan))

    def observations(self) -> Mapping[str, float]:
        """Numbers for the metrics page."""
        ledger = self.ledger
        return {
            "executables": float(len(self._programs)),
            "compile_seconds": self._compile_s,
            "compilations_after_ready": float(self._compilations_after_ready),
            "weight_bytes": float(ledger.weights if ledger else self._spec.model.device_nbytes(self._spec.mesh)),
            "arena_bytes": float(ledger.arena if ledger else 0),
            "largest_temporary_bytes": float(ledger.largest_temporary if ledger else 0),
        }

    def _program(self, bucket: Bucket, plain: bool) -> jax.stages.Compiled:
        key = bucket, plain and True in self._spec.variants
        program = self._programs.get(key)
        if program is None:
            self._count_compilation()
            started = time.perf_counter()
            program = self._programs[key] = compile_step(self._spec, bucket, self._bound_arena(), plain=key[1])
            self._compile_s += time.perf_counter() - started
        if self._arena is None:
            self._allocate(self._bound_arena())
        return program

    def _load_slot(self, *arguments: np.ndarray) -> SlotTable:
        if self._load_program is None:
            self._count_compilation()
            self._load_program = compile_load(self._spec)
        return self._load_program(self._slots, *arguments)

    def _count_compilation(self) -> None:
        self._compilations_after_ready += self._ready


def _wanted(plan: BatchPlan, output: StepOutput) -> list[jax.Array]:
    """Outputs that this plan's rows asked for; the rest stays on the device."""
    flags = np.bitwise_or.reduce(plan.row_flags)
    leaves = [output.token_ids]
    if flags & RowFlag.LOGPROBS:
        assert output.logprobs is not None
        leaves += output.logprobs
    if flags & RowFlag.PROMPT_LOGPROBS and plan.phase is Phase.PREFILL and output.prompt is not None:
        leaves += output.prompt
    return leaves
