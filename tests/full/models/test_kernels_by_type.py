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

from resin.models.cache.paged import PagedCache
from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.declare import Placement
from resin.models.experts import ExpertSizes, MixtureOfExperts, listed_experts
from resin.models.forward import Pass
from resin.models.linear import Linear
from resin.models.norm import RMSNorm
from resin.models.ops import pick_ops
from resin.models.ops.protocol import ExpertOperands, HeadNorm, HeadOperands, Routed
from resin.models.rope import Rope
from resin.models.routers import Router
from resin.models.tokens import Tokens
from resin.pallas_kernels.gates import SILU, GateFunction
from resin.pallas_kernels.route import RouteRule
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan import HistoryGroup, Phase, Plane, plan_geometry

BF16 = Placement("bfloat16")
TOKENS, HIDDEN, HEAD, EXPERTS = 2, 64, 64, 4
KERNELS = {"dense_small", "project_heads", "rope_append", "route_tokens", "grouped_product"}
ENTRIES, HOW = PlaneRef("history", "kv", 0, 2, HEAD), Attend(0.125)
GROUPS = (HistoryGroup("history", (Plane("kv", 2, HEAD),)),)


class TwiceNorm(RMSNorm):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) * 2


class LastRouter(Router):
    """Takes the experts in the order of their numbers, the last ones first."""

    def __call__(self, run: Pass, x: jax.Array, norm: RMSNorm | None = None) -> Routed:
        routed = super().__call__(run, x, norm)
        last = jnp.arange(EXPERTS - 1, 1, -1, dtype=jnp.int32)
        return routed._replace(experts=jnp.zeros_like(routed.experts) + last[None, :])


class TwiceMatrix(Linear):
    def operand(self) -> jax.Array:
        return super().operand() * 2


class TwiceExperts(MixtureOfExperts):
    def operands(self) -> ExpertOperands:
        operands = super().operands()
        return operands._replace(down=operands.down * 2)


def twice(gate: jax.Array, up: jax.Array) -> jax.Array:
    return SILU(gate, up) * 2


def drawn(module: nnx.Module, seed: int) -> nnx.Module:
    graph, state = nnx.split(module)
    leaves = [value for _, value in nnx.to_flat_state(state)]
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return nnx.merge(graph, [jax.random.normal(k, x.shape, x.dtype) / 4 for k, x in zip(keys, leaves, strict=True)])


def norm(kind: type[RMSNorm] = RMSNorm, width: int = HIDDEN, eps: float = 1e-5) -> RMSNorm:
    return drawn(kind(BF16, "norm", width, eps), 2)


def experts(
    router: type[Router] = Router,
    matrix: type[Linear] = Linear,
    mixture: type[MixtureOfExperts] = MixtureOfExperts,
    gate: GateFunction = SILU,
) -> MixtureOfExperts:
    sizes = ExpertSizes(experts=EXPERTS, top_k=2, hidden=HIDDEN, width=32)
    built = router(BF16, "gate", rule=RouteRule(2), hidden=HIDDEN, experts=EXPERTS)
    module = drawn(listed_experts(BF16, "experts", sizes, ("w1", "w3", "w2"), built), 3)
    module.down.__class__ = matrix
    module.__class__ = mixture
    module.gate = gate
    return module


def product(run: Pass, x: jax.Array, kind: type[RMSNorm]) -> jax.Array:
    return run.ops.linear(x, jnp.eye(HIDDEN, dtype=x.dtype), norm=norm(kind))


def gated(run: Pass, x: jax.Array, gate: GateFunction) -> jax.Array:
    return run.ops.linear(x, jnp.tile(jnp.eye(HIDDEN, dtype=x.dtype), 2), gate=gate)


def attention(run: Pass, x: jax.Array, *norms: HeadNorm, before: type[RMSNorm] = RMSNorm) -> jax.Array:
    weight = jax.random.normal(jax.random.key(5), (HIDDEN, 3 * HEAD), x.dtype) / 8
    rotation = run.rotation(Rope(tuple(np.geomspace(1, 0.01, HEAD // 2).tolist())))
    qkv = HeadOperands(weight, None, norms or None, 1, HEAD)
    target = run.cache.target(ENTRIES, HOW, None)
    heads = run.ops.project_heads(x, qkv, rotation, norm=norm(before), target=target)
    run.cache.append_heads(ENTRIES, heads)
    return run.cache.attend(heads.query, *ENTRIES.halves(), HOW).out


# What runs, and the kernel that would run if every block were the plain one.
CASES: dict[str, tuple[str, Callable[[Pass, jax.Array, bool], jax.Array]]] = {
    "norm of a product": ("dense_small", lambda run, x, own: product(run, x, TwiceNorm if own else RMSNorm)),
    "norm before heads": (
        "project_heads",
        lambda run, x, own: attention(run, x, before=TwiceNorm if own else RMSNorm),
    ),
    "norm of heads": (
        "project_heads",
        lambda run, x, own: attention(run, x, norm(), norm(TwiceNorm if own else RMSNorm)),
    ),
    "norms of heads that differ": (
        "project_heads",
        lambda run, x, own: attention(run, x, norm(), norm(eps=10.0 if own else 1e-5)),
    ),
    "norm that is only a function": (
        "project_heads",
        lambda run, x, own: attention(run, x, norm(), (lambda heads: norm()(heads) * 2) if own else norm()),
    ),
    "norm of joined heads": (
        "rope_append",
        lambda run, x, own: attention(run, x, norm(), norm(TwiceNorm if own else RMSNorm), before=TwiceNorm),
    ),
    "gate": ("dense_small", lambda run, x, own: gated(run, x, twice if own else SILU)),
    "norm of a router": (
        "route_tokens",
        lambda run, x, own: experts()(run, x, norm=norm(TwiceNorm if own else RMSNorm)),
    ),
    "gate of experts": ("grouped_product", lambda run, x, own: experts(gate=twice if own else SILU)(run, x)),
}

# What the kernels take as it is, from whatever class.
OPERANDS: dict[str, tuple[str, Callable[[Pass, jax.Array, bool], jax.Array]]] = {
    "router": ("grouped_product", lambda run, x, own: experts(LastRouter if own else Router)(run, x)),
    "matrix of experts": (
        "grouped_product",
        lambda run, x, own: experts(matrix=TwiceMatrix if own else Linear)(run, x),
    ),
    "operands of experts": (
        "grouped_product",
        lambda run, x, own: experts(mixture=TwiceExperts if own else MixtureOfExperts)(run, x),
    ),
}


def build_pass(backend: Backend) -> tuple[Pass, PagedCache]:
    """One new token for each of two sequences that hold nothing yet."""
    geometry = plan_geometry(GROUPS, arena_dtype="bfloat16", page_tokens=16)
    columns = {
        "seq_lens": [1] * TOKENS,
        "query_indptr": range(TOKENS + 1),
        "page_indptr:history": range(TOKENS + 1),
        "page_ids:history": range(1, TOKENS + 1),
        "first_position:history": [0] * TOKENS,
        "append_pages:history": range(1, TOKENS + 1),
        "append_offsets:history": [0] * TOKENS,
    }
    kernels = pick_kernels("cpu", backend=backend)
    zeros, places = jnp.zeros(TOKENS, jnp.int32), jnp.arange(TOKENS, dtype=jnp.int32)
    tokens = Tokens(zeros, zeros, places, jnp.ones(TOKENS, jnp.bool_))
    cache = PagedCache(
        phase=Phase.DECODE,
        columns={name: jnp.array(list(column), jnp.int32) for name, column in columns.items()},
        tokens=tokens,
        arena=jnp.zeros((TOKENS + 1, geometry.page_bytes // 2), jnp.bfloat16),
        groups=GROUPS,
        geometry=geometry,
        kernels=kernels,
    )
    return Pass(tokens, cache, pick_ops(kernels)), cache


Program = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def program(run: Callable[[Pass, jax.Array, bool], jax.Array], backend: Backend, own: bool) -> Program:
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        made, cache = build_pass(backend)
        return run(made, x, own), cache.arena

    return step


def kernels_of(step: Program, x: jax.Array) -> set[str]:
    text = str(jax.make_jaxpr(step)(x))
    return {name for name in KERNELS if f"name={name}\n" in text or f"name={name} " in text}


@pytest.mark.parametrize("name", [*CASES, *OPERANDS])
def test_a_subclass_is_what_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, run = (CASES | OPERANDS)[name]
    x = jax.random.normal(jax.random.key(0), (TOKENS, HIDDEN), jnp.bfloat16)
    assert kernel in kernels_of(program(run, Backend.INTERPRET, False), x)
    assert (kernel in kernels_of(program(run, Backend.INTERPRET, True), x)) == (name in OPERANDS)
    plain, expected = (jax.jit(program(run, Backend.REFERENCE, own))(x) for own in (False, True))
    assert any(np.abs(np.subtract(*pair, dtype=np.float32)).max() > 0.1 for pair in zip(plain, expected, strict=True))
    # The attention kernel reads pages of whatever model, and is slow to interpret.
    made = pick_kernels("cpu", backend=Backend.INTERPRET)
    reference = pick_kernels("cpu").paged_decode
    monkeypatch.setattr(
        "tests.full.models.test_kernels_by_type.pick_kernels",
        lambda platform, backend: dataclasses.replace(made, paged_decode=_uncounted(reference)),
    )
    for got, wanted in zip(jax.jit(program(run, Backend.INTERPRET, True))(x), expected, strict=True):
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=0.03, atol=0.03)


def _uncounted(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, counters=None, **options: attend(*arguments, **options)
