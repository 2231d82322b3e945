"""The inputs that a short causal filter still needs, in the arena: read, and moved on by this step's tokens.

A layer's State holds the `taps` inputs before a sequence's next token, the oldest first, as rows of W elements; a state
may span several pages. A sequence whose chunk has n tokens holds afterwards rows n to n + taps of (state, then chunk).
Where it is not known yet how many of its tokens hold, every count of them leaves a state of its own: a copy.

Reading and writing are one kernel because XLA fuses a gather from the arena into the scatter that follows, which then
reads what it writes, so that it copies the whole arena first. Sequence b's rows are read and written by one program for
each `lanes` columns, and it reads before it writes: input and output pages may be the same. Nothing is written to page
0, where padding belongs, and nothing read from it.

Grid: (sequence, column block) of one warp, 16 bytes a thread: 512 sequences of 2048 channels are 4096 programs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.tiles import NOWHERE, from_arena, to_arena

LANES = 256  # columns a program: 8 values of 16 bits for each thread of a warp


def shift_state(
    x: jax.Array,
    arena: jax.Array,
    input_pages: jax.Array,
    output_pages: jax.Array,
    query_indptr: jax.Array,
    is_fresh: jax.Array,
    first_row: jax.Array | int,
    *,
    taps: int,
    copies: int = 1,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Gives what came before each sequence's chunk, and leaves in the arena what comes before its next one.

    Args:
        x: `[T, W]`, the chunks one after another.
        arena: `[num_pages, page_elements]` in any float, or uint16 that holds bfloat16 bits; updated in place.
        input_pages: int32 `[B * pages_per_state]`, where each state is.
        output_pages: int32 `[B * copies * pages_per_state]`, where it goes.
        query_indptr: int32 `[B + 1]`, where chunks start and end in x.
        is_fresh: bool `[B]`, sequences that start here: zeros came before.
        first_row: int32 scalar, rows of W elements from a state's start to the layer's.
        taps: inputs that the filter sees before the current one.
        copies: states that are left: one, after the whole chunk, or several, copy j after its first j + 1 tokens.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        `[B, taps, W]` in x's dtype, the oldest first, and the arena.
    """
    width, sequences = x.shape[1], query_indptr.shape[0] - 1
    pages_per_state = input_pages.shape[0] // sequences
    spec = _Spec(taps, copies, sequences, width, arena.shape[1] // width, pages_per_state, interpret)
    columns = (input_pages, output_pages, query_indptr, is_fresh.astype(jnp.int32))
    first = jnp.asarray(first_row, jnp.int32).reshape(1)
    held, rows = _call(spec, x, *columns, first, arena.reshape(-1, width))
    return held.reshape(sequences, taps, width), rows.reshape(arena.shape)


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    taps: int
    copies: int
    sequences: int
    width: int
    rows_per_page: int
    pages_per_state: int
    interpret: bool


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, x, input_pages, output_pages, query_indptr, is_fresh, first, arena):
    """The kernel call. Nested jit: the layers of a model trace and lower it once."""
    inputs = [x, input_pages, output_pages, query_indptr, is_fresh, first, arena]
    return pl.pallas_call(
        functools.partial(_shift_state_kernel, spec=spec),
        grid=(spec.sequences, -(-spec.width // LANES)),
        out_shape=(
            jax.ShapeDtypeStruct((spec.sequences * spec.taps, spec.width), x.dtype),
            jax.ShapeDtypeStruct(arena.shape, arena.dtype),
        ),
        input_output_aliases={len(inputs) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=spec.interpret,
        name="shift_state",
    )(*inputs)


def _shift_state_kernel(x_ref, in_ref, out_ref, indptr_ref, fresh_ref, first_ref, _, held_ref, arena_ref, *, spec):
    sequence = pl.program_id(0)
    taps = jnp.arange(pl.next_power_of_2(spec.taps), dtype=jnp.int32)
    lanes = (pl.program_id(1) * LANES + jnp.arange(LANES, dtype=jnp.int32))[None, :]
    inside = lanes < spec.width
    start, end = indptr_ref[sequence], indptr_ref[sequence + 1]
    is_kept = fresh_ref[sequence] == 0

    def place(pages_ref, tap, wanted, state):
        """Index of rows of the arena and mask, both of a tile: `tap` [rows] of the state where `wanted`."""
        row = first_ref[0] + tap
        at = state * spec.pages_per_state + row // spec.rows_per_page
        page = plgpu.load(pages_ref.at[jnp.where(wanted, at, NOWHERE)], mask=wanted, other=0)
        row = jnp.where(page > 0, page * spec.rows_per_page + row % spec.rows_per_page, NOWHERE)
        return (row[:, None], lanes), (page > 0)[:, None] & inside

    def load_state(tap):
        at, mask = place(in_ref, tap, (tap < spec.taps) & is_kept, sequence)
        return from_arena(plgpu.load(arena_ref.at[at], mask=mask, other=0), x_ref.dtype)

    wanted = (taps < spec.taps)[:, None] & inside

    def state_at(end):
        token = end - spec.taps + taps
        is_new = (token >= start)[:, None] & wanted
        at = jnp.where(token >= start, token, NOWHERE)[:, None], lanes
        return jnp.where(is_new, plgpu.load(x_ref.at[at], mask=is_new, other=0), load_state(taps + end - start))

    at = jnp.where(taps < spec.taps, sequence * spec.taps + taps, NOWHERE)[:, None], lanes
    plgpu.store(held_ref.at[at], load_state(taps), mask=wanted)
    ends = [end] if spec.copies == 1 else [start + copy + 1 for copy in range(spec.copies)]
    after = [state_at(end) for end in ends]
    if not spec.interpret:
        plgpu.debug_barrier()  # no thread writes what another still has to read: pages may be read and written here
    for copy, state in enumerate(after):
        at, mask = place(out_ref, taps, taps < spec.taps, sequence * spec.copies + copy)
        plgpu.store(arena_ref.at[at], to_arena(state, arena_ref.dtype), mask=mask)


def shift_state_ref(
    x: jax.Array,
    arena: jax.Array,
    input_pages: jax.Array,
    output_pages: jax.Array,
    query_indptr: jax.Array,
    is_fresh: jax.Array,
    first_row: jax.Array | int,
    *,
    taps: int,
    copies: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain XLA, a gather and a scatter; page 0 is read and written as well.

    Arguments and result as in `shift_state`.
    """
    starts, ends = query_indptr[:-1], query_indptr[1:]
    held, arena = read_states(arena, input_pages, is_fresh, first_row, rows=taps, width=x.shape[1], dtype=x.dtype)
    counts = (ends - starts)[:, None]
    if copies > 1:
        counts = jnp.broadcast_to(jnp.arange(1, copies + 1, dtype=jnp.int32)[None, :], (starts.shape[0], copies))
    ages = jnp.arange(taps, 0, -1, dtype=jnp.int32)
    back = (
        counts[:, :, None] - ages[None, None, :]
    )  # of each tap of each copy, its place in the chunk; negative: in the state
    recent = x.at[jnp.maximum(starts[:, None, None] + back, 0)].get(mode="clip")
    kept = jax.vmap(lambda rows, at: rows[at])(held, jnp.clip(taps + back, 0, taps - 1))
    after = jnp.where((back >= 0)[..., None], recent, kept).reshape(-1, taps, x.shape[1])
    return held, write_states(arena, output_pages, after, first_row)


def read_states(
    arena: jax.Array,
    pages: jax.Array,
    is_fresh: jax.Array,
    first_row: jax.Array | int,
    *,
    rows: int,
    width: int,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Rows of each sequence's state.

    Args:
        arena: as in `shift_state`.
        pages: int32 `[B * pages_per_state]`, where each state is.
        is_fresh: bool `[B]`, sequences that start here: zeros came before.
        first_row: int32 scalar, rows of `width` elements from a state's start.
        rows: of the state.
        width: values a row.
        dtype: of the result.

    Returns:
        `[B, rows, width]`, and the arena that `write_states` takes: it comes after what was read, since XLA would fuse
        both and copy the arena.
    """
    flat = arena.reshape(-1, width)
    at = _places(arena, pages, is_fresh.shape[0], first_row, rows, width)
    held = from_arena(flat.at[at].get(mode="promise_in_bounds"), dtype)
    held = jnp.where(is_fresh[:, None, None], jnp.zeros((), dtype), held)
    held, flat = lax.optimization_barrier((held, flat))  # in the shape that is written: a view of it is a copy
    return held, flat.reshape(arena.shape)


def write_states(arena: jax.Array, pages: jax.Array, value: jax.Array, first_row: jax.Array | int) -> jax.Array:
    """The arena with `[B, rows, width]` in place of the rows that `read_states` reads."""
    sequences, rows, width = value.shape
    at = _places(arena, pages, sequences, first_row, rows, width)
    flat = arena.reshape(-1, width).at[at].set(to_arena(value, arena.dtype), mode="promise_in_bounds")
    return flat.reshape(arena.shape)


def _places(
    arena: jax.Array, pages: jax.Array, sequences: int, first_row: jax.Array | int, rows: int, width: int
) -> jax.Array:
    """int32 `[B, rows]`, where the rows of each state lie in an arena of vectors of `width`."""
    rows_per_page = arena.shape[1] // width
    row = first_row + jnp.arange(rows, dtype=jnp.int32)
    state = pages.reshape(sequences, -1)
    return state[:, row // rows_per_page] * rows_per_page + (row % rows_per_page)[None, :]
