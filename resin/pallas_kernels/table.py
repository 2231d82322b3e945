"""Which implementation of each kernel a platform runs: the one place that decides.

`fresh_prefill` is the one kernel that is not ours and that a platform may lack: cuDNN's attention beside Triton bodies,
plain XLA beside interpreted ones, None beside the references. Without it every prompt takes `paged_prefill`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.experimental import pallas as pl

from resin.pallas_kernels.dense_small import dense_small
from resin.pallas_kernels.draw import sample_tokens_ref
from resin.pallas_kernels.experts import expert_ffn
from resin.pallas_kernels.experts_packed import packed_expert_ffn
from resin.pallas_kernels.fresh_prefill import fresh_prefill_attention
from resin.pallas_kernels.gpu import H200, Gpu
from resin.pallas_kernels.paged_decode import paged_decode_attention
from resin.pallas_kernels.paged_prefill import paged_prefill_attention
from resin.pallas_kernels.paged_ref import paged_decode_attention_ref, paged_prefill_attention_ref
from resin.pallas_kernels.project_heads import project_heads
from resin.pallas_kernels.rope_append import rope_append
from resin.pallas_kernels.route import NormedRows, route_tokens
from resin.pallas_kernels.sampling import sample_tokens
from resin.pallas_kernels.shift_state import shift_state, shift_state_ref
from resin.pallas_kernels.tiles import MIN_ROWS

# Most rows for which `dense_small` is faster than XLA's product and the kernels that surround it, by what it takes in
# beside the product. Measured on an H200, us: 4096 x 28672 gated with its norm at 32 rows 55 against 60 (at 64 rows 65
# against 63), 14336 x 4096 and 4096 x 4096 with a residual at 128 rows 36 and 16 against 37 and 18.
DENSE_KERNEL_ROWS, DENSE_GATED_ROWS, DENSE_RESIDUAL_ROWS = 16, 32, 128
# The same for `project_heads`.
HEADS_KERNEL_ROWS = 32
# Above `DENSE_KERNEL_ROWS` smaller weights are XLA's: a 0.6B model's step of 32 rows took 2.10 ms with its products and
# 2.30 with ours.
MANY_ROWS_WEIGHTS = 1 << 23
# Most tokens of `route_tokens`, and most scores of a tile: one program chooses for all tokens, and twice as many scores
# no longer fit its registers.
ROUTE_ROWS, ROUTE_SCORES = 128, 1 << 13


class Backend(enum.Enum):
    """How kernels run."""

    TRITON = "triton"
    """Pallas bodies, compiled for the GPU."""
    REFERENCE = "reference"
    """Plain XLA."""
    INTERPRET = "interpret"
    """Pallas bodies in Pallas' interpreter: for tests."""


PLATFORMS = {"cuda": Backend.TRITON, "gpu": Backend.TRITON, "cpu": Backend.REFERENCE}


@dataclass(frozen=True, slots=True)
class ProductKernels:
    """Products of few rows and what surrounds them; signatures are those of the functions named alike."""

    dense: Callable[..., tuple[jax.Array, jax.Array | None]]
    project_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
    rope_append: Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
    route_tokens: Callable[..., tuple[jax.Array, jax.Array, NormedRows, jax.Array | None]]
    expert_ffn: Callable[..., jax.Array]
    packed_expert_ffn: Callable[..., jax.Array]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one platform; signatures are those of the functions named alike in this package."""

    backend: Backend
    products: ProductKernels | None
    """None where they are XLA's."""
    paged_decode: Callable[..., tuple[jax.Array, jax.Array | None, jax.Array | None]]
    paged_prefill: Callable[..., tuple[jax.Array, jax.Array | None]]
    fresh_prefill: Callable[..., jax.Array] | None
    shift_state: Callable[..., tuple[jax.Array, jax.Array]]
    sample_tokens: Callable[..., jax.Array]


def pick_kernels(
    platform: str, *, gpu: Gpu = H200, backend: Backend | None = None, has_fresh_prefill: bool = True
) -> Kernels:
    """The kernels for a platform.

    Args:
        platform: JAX's name of it ("cpu", "cuda", "gpu"); platforms without an entry take the XLA references.
        gpu: what tiles are chosen for.
        backend: overrides the platform's.
        has_fresh_prefill: False leaves out `fresh_prefill` everywhere.
    """
    backend = backend or PLATFORMS.get(platform, Backend.REFERENCE)
    if backend is Backend.REFERENCE:
        return Kernels(
            backend,
            products=None,
            paged_decode=paged_decode_attention_ref,
            paged_prefill=paged_prefill_attention_ref,
            fresh_prefill=None,
            shift_state=shift_state_ref,
            sample_tokens=sample_tokens_ref,
        )
    interpret = backend is Backend.INTERPRET
    fresh = functools.partial(fresh_prefill_attention, implementation="xla" if interpret else "cudnn")
    return Kernels(
        backend,
        products=ProductKernels(
            dense=functools.partial(dense_small, gpu=gpu, interpret=interpret),
            project_heads=functools.partial(project_heads, gpu=gpu, interpret=interpret),
            rope_append=functools.partial(rope_append, interpret=interpret),
            route_tokens=functools.partial(route_tokens, interpret=interpret),
            expert_ffn=functools.partial(expert_ffn, interpret=interpret),
            packed_expert_ffn=functools.partial(packed_expert_ffn, gpu=gpu, interpret=interpret),
        ),
        paged_decode=functools.partial(paged_decode_attention, gpu=gpu, interpret=interpret),
        paged_prefill=functools.partial(paged_prefill_attention, interpret=interpret),
        fresh_prefill=fresh if has_fresh_prefill else None,
        shift_state=functools.partial(shift_state, interpret=interpret),
        sample_tokens=functools.partial(sample_tokens, interpret=interpret),
    )


def takes_dense_kernel(rows: int, weights: int, *, is_gated: bool, has_residual: bool) -> bool:
    """Whether a product of this many rows and weights is `dense_small`'s, not XLA's."""
    most = DENSE_RESIDUAL_ROWS if has_residual else DENSE_GATED_ROWS if is_gated else DENSE_KERNEL_ROWS
    return rows <= DENSE_KERNEL_ROWS or (rows <= most and weights >= MANY_ROWS_WEIGHTS)


def takes_heads_kernel(rows: int, weights: int) -> bool:
    """Whether a QKV product is `project_heads`', not XLA's with `rope_append` after it."""
    return rows <= DENSE_KERNEL_ROWS or (rows <= HEADS_KERNEL_ROWS and weights >= MANY_ROWS_WEIGHTS)


def takes_route_kernel(rows: int, experts: int) -> bool:
    """Whether a router of this many tokens and experts is `route_tokens`', not XLA's."""
    tile_rows = max(MIN_ROWS, pl.next_power_of_2(rows))
    return rows <= ROUTE_ROWS and tile_rows * pl.next_power_of_2(experts) <= ROUTE_SCORES
