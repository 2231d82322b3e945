"""One program a step: unpack the plan, run the model, sample, update the slots. Compiled for every kind of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from resin.models.axes import Axis
from resin.models.cache.paged import PagedCache
from resin.models.declare import axes_of
from resin.models.families import Model
from resin.models.forward import Pass
from resin.models.ops import pick_ops
from resin.models.weights import AbstractModel
from resin.pallas_kernels.gpu import Gpu
from resin.pallas_kernels.table import Backend, Kernels, pick_kernels
from resin.plan import ArenaSpec, Bucket, Phase, PlanLayout, RowFlag, RunnerConfig, plan_layout
from resin.plan.layout import HEADER
from resin.runtime.drafting import Drafter, Verdict, draft_next, report, verify
from resin.runtime.logprobs import Logprobs, no_logprobs, token_logprobs
from resin.runtime.mesh import shape_of
from resin.runtime.places import derive
from resin.runtime.program_kind import ProgramKind, bucket_kinds
from resin.runtime.sampling import sample
from resin.runtime.slots import SlotTable, abstract_slots, idle_load, load_slot, load_steps
from resin.runtime.special import MASK_ROWS, mask_blocks
from resin.runtime.xla_options import step_options

# Prompt tokens whose logits are made at once: 64 rows of a 200k vocabulary are 50 MB.
PROMPT_LOGPROB_TOKENS = 64

# Everything that replicas have of their own lies one below the other: inside a program it is as if there were one.
ARENA_SPEC = PartitionSpec("dp", "tp")
OF_REPLICAS = PartitionSpec("dp")
REPLICATED = PartitionSpec()


class StepOutput(NamedTuple):
    """What a step leaves for the host."""

    token_ids: jax.Array  # int32 [B, Q], a token for each of a row's places
    logprobs: Logprobs | None  # [B]; None if the program takes no special rows
    prompt: Logprobs | None  # [T], of the token that follows each; None if it does not, and in decode
    drafting: jax.Array | None = None  # int32 [B, 3], a DraftReport of each row; None if the runner drafts nothing


@dataclass(frozen=True, slots=True)
class StepSpec:
    """Everything that the programs of one runner have in common.

    Attributes:
        model: structure and declarations.
        config: groups, geometry, limits.
        mesh: where it runs.
        dtype: of the activations; float32 computes products in full float32.
        backend: of the kernels; None takes the platform's.
        has_fresh_prefill: whether prompts of which nothing is cached may attend without reading pages.
        drafter: guesses at the tokens to come; None where the config has no drafts.
    """

    model: AbstractModel
    config: RunnerConfig
    mesh: Mesh
    dtype: str
    backend: Backend | None = None
    has_fresh_prefill: bool = True
    drafter: Drafter | None = None

    def kinds(self, bucket: Bucket) -> tuple[ProgramKind, ...]:
        """The programs of a bucket."""
        return bucket_kinds(bucket, self.config, self.kernels(), dtype=self.dtype, devices=self.mesh.size)

    def kernels(self) -> Kernels:
        """The kernels that the mesh's devices run."""
        device = self.mesh.devices.flat[0]
        return pick_kernels(
            device.platform,
            gpu=Gpu.of(device),
            backend=self.backend,
            has_fresh_prefill=self.has_fresh_prefill,
        )

    def facts(self) -> dict[str, str]:
        """What the programs have in common, in words."""
        kinds = {kind.value: None for bucket in self.config.buckets for kind in self.kinds(bucket)}
        return {
            "dtype": self.dtype,
            "cache": self.config.arena_dtype,
            "kernels": self.kernels().backend.value,
            "programs": "+".join(kinds),
            "mesh": str(shape_of(self.mesh)),
        }

    def arguments(self, bucket: Bucket, arena: ArenaSpec, kind: ProgramKind) -> tuple[Any, ...]:
        """Abstract arguments of a bucket's program: weights, arena, slots, plan buffer, blocks of masks."""
        words = plan_layout(bucket, self.config.groups, self.config.geometry).words
        masks = jax.ShapeDtypeStruct((MASK_ROWS, -(-self.config.vocab_size // 32)), np.int32)
        buffer, masks = of_replicas((jax.ShapeDtypeStruct((words,), np.int32), masks), self.mesh)
        return (
            self.model.arguments(self.mesh),
            abstract_arena(arena, self.mesh),
            self.slots(),
            buffer,
            (masks,) * mask_blocks(kind.special_counts(bucket)[-1]),
        )

    def slots(self) -> SlotTable:
        """Abstract slot tables of all replicas."""
        table = abstract_slots(self.config, NamedSharding(self.mesh, REPLICATED), self.drafter)
        replicas: SlotTable = of_replicas(table, self.mesh)
        return replicas


def of_replicas(tree: Any, mesh: Mesh) -> Any:
    """Abstract arrays of one replica, of all: one below the other in the first axis."""
    sharding, count = NamedSharding(mesh, OF_REPLICAS), mesh.shape["dp"]

    def stack(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return jax.tree.map(stack, tree)


def abstract_arena(arena: ArenaSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Shape of the replicas' arenas: `page_bytes` of every page on each device of the axis "tp"."""
    page_elements = arena.page_bytes // jnp.dtype(arena.dtype).itemsize
    shape = (arena.num_pages * mesh.shape["dp"], page_elements * mesh.shape["tp"])
    return jax.ShapeDtypeStruct(shape, arena.dtype, sharding=NamedSharding(mesh, ARENA_SPEC))


def mapped_step(spec: StepSpec, bucket: Bucket, kind: ProgramKind, mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """A bucket's step of one kind over a mesh: `(weights, arena, slots, buffer, masks) -> (arena, slots, StepOutput)`.

    Args:
        mesh: the spec's, or an abstract one of the same axes, to lower what no device here runs.
    """
    layout = plan_layout(bucket, spec.config.groups, spec.config.geometry)

    def step(
        weights: tuple[jax.Array, ...],
        arena: jax.Array,
        slots: SlotTable,
        buffer: jax.Array,
        masks: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, SlotTable, StepOutput]:
        return run_step(spec, bucket, layout, weights, arena, slots, buffer, masks, kind)

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spec.model.specs(spec.mesh), ARENA_SPEC, OF_REPLICAS, OF_REPLICAS, OF_REPLICAS),
        out_specs=(ARENA_SPEC, OF_REPLICAS, OF_REPLICAS),
        check_vma=False,
    )


def compile_step(spec: StepSpec, bucket: Bucket, arena: ArenaSpec, kind: ProgramKind) -> jax.stages.Compiled:
    """Compiles a bucket's program of one kind; arena and slots are donated and come back in place."""
    mapped = mapped_step(spec, bucket, kind, spec.mesh)
    with jax.default_matmul_precision("highest" if spec.dtype == "float32" else "default"):
        lowered = jax.jit(mapped, donate_argnums=(1, 2)).lower(*spec.arguments(bucket, arena, kind))
    return lowered.compile(compiler_options=step_options(bucket, spec.kernels().backend))


def compile_load(spec: StepSpec) -> jax.stages.Compiled:
    """Compiles `load_slot` of a slot in each replica; their tables are donated.

    Returns:
        `(slots, *arguments) -> slots`, with the arguments that `load_steps` yields.
    """
    (calls,) = load_steps([[idle_load(spec.config)]] * spec.mesh.shape["dp"], spec.config)
    sharding = NamedSharding(spec.mesh, OF_REPLICAS)
    arguments = [jax.ShapeDtypeStruct(call.shape, call.dtype, sharding=sharding) for call in calls]

    def load(slots: SlotTable, *arguments: jax.Array) -> SlotTable:
        return load_slot(spec.drafter, slots, *(argument[0] for argument in arguments))

    mapped = jax.shard_map(load, mesh=spec.mesh, in_specs=OF_REPLICAS, out_specs=OF_REPLICAS, check_vma=False)
    return jax.jit(mapped, donate_argnums=0).lower(spec.slots(), *arguments).compile()


def run_step(
    spec: StepSpec,
    bucket: Bucket,
    layout: PlanLayout,
    weights: tuple[jax.Array, ...],
    arena: jax.Array,
    slots: SlotTable,
    buffer: jax.Array,
    masks: tuple[jax.Array, ...],
    kind: ProgramKind,
) -> tuple[jax.Array, SlotTable, StepOutput]:
    """The traced body: one device's view of a step."""
    specs = list(zip(spec.config.groups, spec.config.geometry.groups, strict=True))
    columns, tokens_in = derive(unpack(layout, buffer), slots, bucket, specs)
    kernels = spec.kernels()
    cache = PagedCache(
        phase=bucket.phase,
        columns=columns,
        tokens=tokens_in,
        arena=arena,
        groups=spec.config.groups,
        geometry=spec.config.geometry,
        kernels=kernels,
        is_fresh=kind is ProgramKind.FRESH,
    )
    axes, longest = axes_of(spec.mesh), spec.config.max_context_tokens
    run = Pass(tokens_in, cache, pick_ops(kernels), axes, context_tokens=longest)
    model = spec.model.merge(weights)
    hidden = model(run)
    wanted = hidden
    if bucket.phase is Phase.PREFILL:
        wanted = hidden.at[jnp.maximum(columns["query_indptr"][1:] - 1, 0)].get(mode="clip")
    sharing = axes.size(Axis.VOCAB)
    shares_rows = sharing > 1 and bucket.sequences % sharing == 0
    logits = model.logits(replace(run, shares_rows=shares_rows), wanted)
    sampled = sample(logits, columns, slots, masks, kernels, kind.special_counts(bucket), axes)
    prompt = None
    if kind.has_prompt_logprobs(bucket):
        prompt = _prompt_logprobs(model, run, columns, hidden)
    slots, drafting = _store(spec.drafter, sampled.slots, columns, bucket, sampled.tokens)
    return cache.arena, slots, StepOutput(sampled.tokens, sampled.logprobs, prompt, drafting)


def unpack(layout: PlanLayout, buffer: jax.Array) -> Mapping[str, jax.Array]:
    """The plan's columns, sliced out of its buffer."""
    columns = {}
    for column in layout.columns:
        words = lax.slice(buffer, (column.offset,), (column.offset + column.length,))
        columns[column.name] = words if column.dtype == "int32" else lax.bitcast_convert_type(words, jnp.float32)
    return columns


def _store(
    drafter: Drafter | None, slots: SlotTable, columns: Mapping[str, jax.Array], bucket: Bucket, tokens: jax.Array
) -> tuple[SlotTable, jax.Array | None]:
    """Notes the latest token and the length of every row in its slot, and what may follow; rows that emit nothing leave
    a token that nobody reads.

    A plan in flight may read the token of a row that a fault has ended.
    """
    lengths, kept, rows = columns["seq_lens"], jnp.zeros_like(columns["seq_lens"]), columns["slots"]
    report_of_rows = None
    if drafter is not None and slots.drafting is not None:
        verdict = Verdict(kept, kept, kept)
        if bucket.phase is Phase.DECODE:
            verdict = verify(tokens, slots.drafting, columns)
            kept = verdict.kept
            live = columns["live_tokens"]
            lengths = lengths - jnp.where(live > 0, live - 1 - kept, 0)
        emits = (columns["row_flags"] & RowFlag.EMIT) != 0
        counts = jnp.where(emits, 1 + kept, 0)
        drafting, ready = draft_next(drafter, slots.drafting, columns, tokens, lengths, counts)
        slots, report_of_rows = replace(slots, drafting=drafting), report(verdict, ready)
    last = jnp.take_along_axis(tokens, kept[:, None], axis=1)[:, 0]
    latest = jnp.stack([jnp.maximum(last, 0), lengths, kept], axis=1)
    return replace(slots, latest=slots.latest.at[rows].set(latest)), report_of_rows


def _prompt_logprobs(model: Model, run: Pass, columns: Mapping[str, jax.Array], hidden: jax.Array) -> Logprobs:
    tokens = run.tokens.ids.shape[0]
    following = jnp.roll(run.tokens.ids, -1)
    last = jnp.where(
        columns["query_indptr"][1:] > columns["query_indptr"][:-1], columns["query_indptr"][1:] - 1, tokens
    )
    following = following.at[last].set(columns["next_token"], mode="drop")
    block = min(PROMPT_LOGPROB_TOKENS, tokens)
    blocks = -(-tokens // block)
    padding = blocks * block - tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(blocks, block, -1)
    following = jnp.pad(following, (0, padding)).reshape(blocks, block)
    # None where no row asks: the loop is the last thing in the program, because the host reads its length.
    wanted = (columns["header"][HEADER.any_flags] & RowFlag.PROMPT_LOGPROBS) != 0
    live = jnp.where(wanted, -(-columns["header"][HEADER.num_tokens] // block), 0)

    def fill(index: jax.Array, out: Logprobs) -> Logprobs:
        part = token_logprobs(model.logits(run, hidden[index]), following[index])
        return jax.tree.map(
            lambda all_rows, rows: lax.dynamic_update_slice_in_dim(all_rows, rows, index * block, 0), out, part
        )

    out = lax.fori_loop(0, live, fill, no_logprobs(blocks * block))
    return jax.tree.map(lambda rows: rows[:tokens], out)
