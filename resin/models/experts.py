"""Mixture of experts: a router, and one gated feed-forward layer an expert, stored plain or packed as MXFP4."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from flax import nnx
from jax import lax

from resin.models.config_reader import ConfigReader
from resin.models.context import Context
from resin.models.declare import (
    BIAS,
    Assembly,
    Deinterleaved,
    Fused,
    FusedPart,
    Init,
    Placement,
    Same,
    Stacked,
    Transposed,
    declare,
)
from resin.models.mxfp4 import BLOCK_BYTES, GROUP_VALUES, unpack_mxfp4
from resin.models.norm import RMSNorm
from resin.models.routers import Router
from resin.plan import InvalidRequest

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps gate and up, both [M, I], to the values that go down."""

MOST_EXPERTS = 4096
E2M1_STD = 2.93  # of the sixteen values, each as likely


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) * up`."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """E experts of width I on a residual stream of width H, k of them for each token."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @classmethod
    def read(cls, given: ConfigReader, *, experts: tuple[str, ...], width: str) -> ExpertSizes:
        """Reads a config; `experts` and `width` are its names for E and I.

        Raises:
            InvalidRequest: a setting is missing or bad, or a token takes more experts than there are.
        """
        count, top_k = given.integer(*experts, high=MOST_EXPERTS), given.integer("num_experts_per_tok")
        if top_k > count:
            given.refuse("num_experts_per_tok", top_k, f"at most {experts[0]}={count}")
        return cls(
            experts=count,
            top_k=top_k,
            hidden=given.integer("hidden_size"),
            width=given.integer(width),
        )

    @property
    def token_share(self) -> float:
        """Share of the experts that one token reads."""
        return self.top_k / self.experts

    def flops(self, inner: int, outer: int) -> int:
        """Operations a token of one `[inner, outer]` matrix an expert."""
        return 2 * self.top_k * inner * outer


class ExpertMatrix(nnx.Module):
    """One `[in, out]` matrix an expert, as numbers of the model's dtype."""

    def __init__(
        self,
        placement: Placement,
        sources: str | list[str],
        sizes: ExpertSizes,
        shape: tuple[int, int],
        *,
        assembly: Assembly,
    ) -> None:
        self.weight = declare(
            (sizes.experts, *shape),
            placement,
            sources,
            assembly=assembly,
            partition=("tp", None, None),
            flops_per_token=sizes.flops(*shape),
            token_share=sizes.token_share,
        )

    def product(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        """`[M, in]` times the matrix of one expert (int32 scalar): `[M, out]`."""
        return x @ self.weight[...][expert]


class PackedExpertMatrix(nnx.Module):
    """The same as MXFP4: a quarter of bfloat16's bytes in memory, decoded when an expert is used."""

    def __init__(
        self, placement: Placement, name: str, sizes: ExpertSizes, shape: tuple[int, int], *, assembly: Assembly
    ) -> None:
        inner, outer = shape
        if inner % GROUP_VALUES:
            raise InvalidRequest("intermediate_size", inner, f"a multiple of {GROUP_VALUES}, the values of a scale")
        groups = inner // GROUP_VALUES
        self.blocks = declare(
            (sizes.experts, outer, groups, BLOCK_BYTES),
            placement,
            f"{name}_blocks",
            assembly=assembly,
            partition=("tp", None, None, None),
            dtype="uint8",
            init=Init(mean=127.5, std=74.0),
            flops_per_token=sizes.flops(*shape),
            token_share=sizes.token_share,
        )
        self.scales = declare(
            (sizes.experts, outer, groups),
            placement,
            f"{name}_scales",
            assembly=assembly,
            partition=("tp", None, None),
            dtype="uint8",
            init=Init(mean=127 - math.log2(E2M1_STD * inner**0.5), std=0.7),
            flops_per_token=0,
            token_share=sizes.token_share,
        )

    def product(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        """`[M, in]` times the matrix of one expert (int32 scalar): `[M, out]`."""
        matrix = unpack_mxfp4(self.blocks[...][expert], self.scales[...][expert], x.dtype)
        return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


class MixtureOfExperts(nnx.Module):
    """`sum_i weight_i * down_i(gate(gate_up_i(x)))` over the experts that the router gives a token.

    Experts are cut over the mesh by their index: a device computes the tokens of its own experts.
    """

    def __init__(
        self,
        placement: Placement,
        sizes: ExpertSizes,
        *,
        router: Router,
        gate_up: ExpertMatrix | PackedExpertMatrix,
        down: ExpertMatrix | PackedExpertMatrix,
        gate: Gate = silu_gate,
        biases: tuple[str, str] | None = None,
    ) -> None:
        """Args:
        biases: checkpoint names of the biases of both matrices, gate and up interleaved; None for none.
        """
        self.share = placement.split("num_experts", sizes.experts)
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.gate = gate
        self.gate_up_bias = (
            declare(
                (sizes.experts, 2 * sizes.width),
                placement,
                biases[0],
                assembly=Deinterleaved(axis=1),
                partition=("tp", None),
                init=BIAS,
                flops_per_token=0,
                token_share=sizes.token_share,
            )
            if biases is not None
            else None
        )
        self.down_bias = (
            declare(
                (sizes.experts, sizes.hidden),
                placement,
                biases[1],
                partition=("tp", None),
                init=BIAS,
                flops_per_token=0,
                token_share=sizes.token_share,
            )
            if biases is not None
            else None
        )

    def __call__(
        self, context: Context, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + experts(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("experts"):
            routed = self.router.route(context, x, norm)
            return context.mix_experts(routed, self.share, self._apply, self._plain_matrices(), residual)

    def _plain_matrices(self) -> tuple[jax.Array, jax.Array] | None:
        """What a kernel for silu-gated experts takes, if these are such."""
        is_own = type(self)._apply is not MixtureOfExperts._apply
        if self.gate is not silu_gate or self.down_bias is not None or is_own:
            return None
        if not type(self.gate_up) is type(self.down) is ExpertMatrix:
            return None
        return self.gate_up.weight[...], self.down.weight[...]

    def _apply(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        joined = self.gate_up.product(expert, x)
        if self.gate_up_bias is not None:
            joined = joined + self.gate_up_bias[...][expert][None, :]
        half = joined.shape[1] // 2
        out = self.down.product(expert, self.gate(joined[:, :half], joined[:, half:]))
        return out if self.down_bias is None else out + self.down_bias[...][expert][None, :]


def listed_experts(
    placement: Placement, name: str, sizes: ExpertSizes, names: tuple[str, str, str], router: Router
) -> MixtureOfExperts:
    """Experts whose gate, up and down matrices are checkpoint tensors of their own, `{name}.{expert}.{part}.weight`."""
    half = Fused((FusedPart(1, sizes.width),) * 2, tp=1)
    gate, up, down = names
    each = range(sizes.experts)
    return MixtureOfExperts(
        placement,
        sizes,
        router=router,
        gate_up=ExpertMatrix(
            placement,
            [f"{name}.{expert}.{part}.weight" for expert in each for part in (gate, up)],
            sizes,
            (sizes.hidden, 2 * sizes.width),
            assembly=Stacked(half, sizes.experts),
        ),
        down=ExpertMatrix(
            placement,
            [f"{name}.{expert}.{down}.weight" for expert in each],
            sizes,
            (sizes.width, sizes.hidden),
            assembly=Stacked(Transposed(), sizes.experts),
        ),
    )


def joined_experts(
    placement: Placement, name: str, sizes: ExpertSizes, *, router: Router, gate: Gate, packed: bool
) -> MixtureOfExperts:
    """Experts in one tensor a matrix, gate and up interleaved, with biases; packed as MXFP4 or plain."""
    kind = PackedExpertMatrix if packed else ExpertMatrix
    gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    # Packed matrices are stored [E, out, in], plain ones [E, in, out].
    halves = Deinterleaved(axis=1 if packed else 2)
    return MixtureOfExperts(
        placement,
        sizes,
        router=router,
        gate_up=kind(placement, gate_up, sizes, (sizes.hidden, 2 * sizes.width), assembly=halves),
        down=kind(placement, down, sizes, (sizes.width, sizes.hidden), assembly=Same()),
        gate=gate,
        biases=(f"{gate_up}_bias", f"{down}_bias"),
    )
