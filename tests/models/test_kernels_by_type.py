"""Kernels stand for the blocks that they know, and for no subclass: what a model makes of a block is what runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from resin.models.context import AttentionLayer, Context
from resin.models.declare import Placement
from resin.models.experts import ExpertMatrix, ExpertSizes, MixtureOfExperts, listed_experts
from resin.models.norm import RMSNorm
from resin.models.paged import PagedContext
from resin.models.rope import Rope
from resin.models.routers import Router
from resin.pallas_kernels.route import RouteRule
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan import HistoryGroup, Phase, Plane, plan_geometry

BF16 = Placement("bfloat16")
TOKENS, HIDDEN, HEAD, EXPERTS = 2, 64, 64, 4
KERNELS = {"dense_small", "project_heads", "rope_append", "route_tokens", "grouped_product"}
LAYER = AttentionLayer("history", 0, 1, HEAD, 0.125)
GROUPS = (HistoryGroup("history", (Plane("kv", 2, HEAD),)),)


class TwiceNorm(RMSNorm):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * 2


class LastRouter(Router):
    """Takes the experts in the order of their numbers, the last ones first."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        experts, weights = super().__call__(x)
        return jnp.zeros_like(experts) + jnp.arange(EXPERTS - 1, 1, -1, dtype=jnp.int32)[None, :], weights


class TwiceMatrix(ExpertMatrix):
    def product(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        return super().product(expert, x) * 2


class TwiceExperts(MixtureOfExperts):
    def _apply(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        return super()._apply(expert, x) * 2


def drawn(module: nnx.Module, seed: int) -> nnx.Module:
    graph, state = nnx.split(module)
    leaves = [value for _, value in nnx.to_flat_state(state)]
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return nnx.merge(graph, [jax.random.normal(k, x.shape, x.dtype) / 4 for k, x in zip(keys, leaves, strict=True)])


def norm(kind: type[RMSNorm] = RMSNorm, width: int = HIDDEN, eps: float = 1e-5) -> RMSNorm:
    return drawn(kind(BF16, "norm", width, eps), 2)


def experts(
    router: type[Router] = Router,
    matrix: type[ExpertMatrix] = ExpertMatrix,
    mixture: type[MixtureOfExperts] = MixtureOfExperts,
) -> MixtureOfExperts:
    sizes = ExpertSizes(experts=EXPERTS, top_k=2, hidden=HIDDEN, width=32)
    built = router(BF16, "gate", rule=RouteRule(2), hidden=HIDDEN, experts=EXPERTS)
    module = drawn(listed_experts(BF16, "experts", sizes, ("w1", "w3", "w2"), built), 3)
    module.down.__class__ = matrix
    module.__class__ = mixture
    return module


def product(context: Context, x: jax.Array, kind: type[RMSNorm]) -> jax.Array:
    return context.product(x, jnp.eye(HIDDEN, dtype=x.dtype), norm=norm(kind))


def attention(context: Context, x: jax.Array, *norms: RMSNorm, before: type[RMSNorm] = RMSNorm) -> jax.Array:
    weight = jax.random.normal(jax.random.key(5), (HIDDEN, 3 * HEAD), x.dtype) / 8
    rope = Rope(tuple(np.geomspace(1, 0.01, HEAD // 2).tolist()))
    return context.attend_product(LAYER, x, weight, None, rope, norm=norm(before), norms=norms or None)


def turned(context: Context, x: jax.Array, *norms: RMSNorm) -> jax.Array:
    rope = Rope(tuple(np.geomspace(1, 0.01, HEAD // 2).tolist()))
    return context.attend_joined(LAYER, jnp.tile(x, 3).reshape(-1, 3, HEAD), rope, norms)


# What runs, and the kernel that would run if every block were the plain one.
CASES: dict[str, tuple[str, Callable[[Context, jax.Array, bool], jax.Array]]] = {
    "norm of a product": ("dense_small", lambda c, x, own: product(c, x, TwiceNorm if own else RMSNorm)),
    "norm before heads": (
        "project_heads",
        lambda c, x, own: attention(c, x, before=TwiceNorm if own else RMSNorm),
    ),
    "norm of heads": (
        "project_heads",
        lambda c, x, own: attention(c, x, norm(), norm(TwiceNorm if own else RMSNorm)),
    ),
    "norms of heads that differ": (
        "project_heads",
        lambda c, x, own: attention(c, x, norm(), norm(eps=10.0 if own else 1e-5)),
    ),
    "norm of joined heads": (
        "rope_append",
        lambda c, x, own: turned(c, x, norm(), norm(TwiceNorm if own else RMSNorm)),
    ),
    "norm of a router": (
        "route_tokens",
        lambda c, x, own: experts()(c, x, norm=norm(TwiceNorm if own else RMSNorm)),
    ),
    "router": ("route_tokens", lambda c, x, own: experts(LastRouter if own else Router)(c, x)),
    "matrix of experts": (
        "grouped_product",
        lambda c, x, own: experts(matrix=TwiceMatrix if own else ExpertMatrix)(c, x),
    ),
    "function of experts": (
        "grouped_product",
        lambda c, x, own: experts(mixture=TwiceExperts if own else MixtureOfExperts)(c, x),
    ),
}


def context(backend: Backend) -> PagedContext:
    """One new token for each of two sequences that hold nothing yet."""
    geometry = plan_geometry(GROUPS, arena_dtype="bfloat16", page_tokens=16)
    columns = {
        "positions": [0] * TOKENS,
        "header": [TOKENS, TOKENS],
        "seq_lens": [1] * TOKENS,
        "query_indptr": range(TOKENS + 1),
        "page_indptr:history": range(TOKENS + 1),
        "page_ids:history": range(1, TOKENS + 1),
        "first_position:history": [0] * TOKENS,
        "append_pages:history": range(1, TOKENS + 1),
        "append_offsets:history": [0] * TOKENS,
    }
    return PagedContext(
        phase=Phase.DECODE,
        columns={name: jnp.array(list(column), jnp.int32) for name, column in columns.items()},
        arena=jnp.zeros((TOKENS + 1, geometry.page_bytes // 2), jnp.bfloat16),
        groups=GROUPS,
        geometry=geometry,
        token_ids=jnp.zeros(TOKENS, jnp.int32),
        kernels=pick_kernels("cpu", backend=backend),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_subclass_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, run = CASES[name]
    x = jax.random.normal(jax.random.key(0), (TOKENS, HIDDEN), jnp.bfloat16)

    def program(backend: Backend, own: bool) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
        def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = context(backend)
            return run(made, x, own), made.arena

        return step

    def kernels(own: bool) -> set[str]:
        text = str(jax.make_jaxpr(program(Backend.INTERPRET, own))(x))
        return {name for name in KERNELS if f"name={name}\n" in text or f"name={name} " in text}

    assert kernel in kernels(own=False)
    assert kernel not in kernels(own=True)
    plain, expected = (jax.jit(program(Backend.REFERENCE, own))(x) for own in (False, True))
    assert any(np.abs(np.subtract(*pair, dtype=np.float32)).max() > 0.1 for pair in zip(plain, expected, strict=True))
    # The attention kernel reads pages of whatever model, and is slow to interpret.
    made = pick_kernels("cpu", backend=Backend.INTERPRET)
    reference = pick_kernels("cpu").paged_decode
    monkeypatch.setattr(
        "tests.models.test_kernels_by_type.pick_kernels",
        lambda platform, backend: dataclasses.replace(made, paged_decode=_uncounted(reference)),
    )
    for got, wanted in zip(jax.jit(program(Backend.INTERPRET, True))(x), expected, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0.03, atol=0.03)


def _uncounted(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, counters=None, **options: attend(*arguments, **options)
