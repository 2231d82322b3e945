"""Mixture of experts: a router, and one gated feed-forward layer an expert, stored plain or packed as MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import Assembly, Deinterleaved, Joined, Piled, Same, Sections, Stacked, Transposed
from resin.models.axes import Axis
from resin.models.config_reader import ConfigReader
from resin.models.declare import BIAS, Placement, declare
from resin.models.forward import Pass
from resin.models.linear import PLAIN, Format, Linear
from resin.models.norm import RMSNorm
from resin.models.ops.protocol import ExpertOperands
from resin.models.packed import Mxfp4Tiles
from resin.models.routers import Router
from resin.pallas_kernels.gates import SILU, GateFunction

MOST_EXPERTS = 4096


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


def expert_matrices(
    placement: Placement,
    sources: str | list[str],
    sizes: ExpertSizes,
    shape: tuple[int, ...],
    *,
    assembly: Assembly,
    format: Format = PLAIN,
) -> Linear:
    """One matrix of a shape `[in, *out]` an expert."""
    return Linear(
        placement,
        sources,
        (sizes.experts, *shape),
        assembly=assembly,
        axes=(Axis.EXPERTS, *(None for _ in shape)),
        format=format,
        is_stack=True,
        flops_per_token=sizes.flops(shape[0], prod(shape[1:])),
        token_share=sizes.token_share,
    )


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
        gate_up: Linear,
        down: Linear,
        gate: GateFunction = SILU,
        biases: tuple[str, str] | None = None,
    ) -> None:
        """Args:
        biases: checkpoint names of the biases of both matrices, gate and up interleaved; None for none.
        """
        placement.split("num_experts", sizes.experts, Axis.EXPERTS)
        self.num_experts = sizes.experts
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.gate = gate
        self.gate_up_bias = (
            declare(
                (sizes.experts, 2, sizes.width),
                placement,
                biases[0],
                assembly=Deinterleaved(),
                axes=(Axis.EXPERTS, None, None),
                init=BIAS,
                inner=0,
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
                axes=(Axis.EXPERTS, None),
                init=BIAS,
                inner=0,
                token_share=sizes.token_share,
            )
            if biases is not None
            else None
        )

    def __call__(
        self, run: Pass, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None
    ) -> jax.Array:
        """`residual + experts(norm(x))`, `[T, hidden]` -> `[T, hidden]`."""
        with jax.named_scope("experts"):
            routed, experts = self.router(run, x, norm), self.operands()
            if run.axes.size(Axis.EXPERTS) == 1:
                return run.ops.experts(routed, experts, residual)
            # Of all tokens that any of the devices has: each computes its experts for everybody.
            routed = jax.tree.map(lambda leaf: run.axes.enter(leaf, Axis.EXPERTS), routed)
            local = routed.experts - run.axes.index(Axis.EXPERTS) * experts.num_experts
            is_mine = (local >= 0) & (local < experts.num_experts)
            routed = routed._replace(experts=jnp.where(is_mine, local, -1))
            out = run.axes.leave(run.ops.experts(routed, experts), Axis.EXPERTS)
            return out if residual is None else residual + out

    def operands(self) -> ExpertOperands:
        """The weights of this device's experts."""
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = self.gate_up_bias[...].reshape(len(self.down_bias[...]), -1), self.down_bias[...]
        return ExpertOperands(self.gate_up.operand(), self.down.operand(), self.gate, biases)


def listed_experts(
    placement: Placement, name: str, sizes: ExpertSizes, names: tuple[str, str, str], router: Router
) -> MixtureOfExperts:
    """Experts whose gate, up and down matrices are checkpoint tensors of their own, `{name}.{expert}.{part}.weight`."""
    gate, up, down = names
    each = range(sizes.experts)
    return MixtureOfExperts(
        placement,
        sizes,
        router=router,
        gate_up=expert_matrices(
            placement,
            [f"{name}.{expert}.{part}.weight" for expert in each for part in (gate, up)],
            sizes,
            (sizes.hidden, 2, sizes.width),
            assembly=Stacked(Joined(2), sizes.experts),
        ),
        down=expert_matrices(
            placement,
            [f"{name}.{expert}.{down}.weight" for expert in each],
            sizes,
            (sizes.width, sizes.hidden),
            assembly=Stacked(Transposed(), sizes.experts),
        ),
    )


def piled_experts(
    placement: Placement, name: str, sizes: ExpertSizes, names: tuple[str, str], router: Router
) -> MixtureOfExperts:
    """Experts in one tensor a matrix, `[experts, out, in]`; the first holds gates, then ups."""
    gate_up, down = (f"{name}.{part}.weight" for part in names)
    gates_then_ups = Sections(Joined(2), (sizes.width, sizes.width))
    return MixtureOfExperts(
        placement,
        sizes,
        router=router,
        gate_up=expert_matrices(
            placement,
            gate_up,
            sizes,
            (sizes.hidden, 2, sizes.width),
            assembly=Piled(gates_then_ups, sizes.experts),
        ),
        down=expert_matrices(
            placement, down, sizes, (sizes.width, sizes.hidden), assembly=Piled(Transposed(), sizes.experts)
        ),
    )


def joined_experts(
    placement: Placement, name: str, sizes: ExpertSizes, *, router: Router, gate: GateFunction, packed: bool
) -> MixtureOfExperts:
    """Experts in one tensor a matrix, gate and up interleaved, with biases; packed as MXFP4 or plain."""
    gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"

    def matrices(source: str, shape: tuple[int, ...], interleaved: bool) -> Linear:
        assembly = Deinterleaved() if interleaved else Same()
        format = Mxfp4Tiles(interleaved) if packed else PLAIN
        return expert_matrices(placement, source, sizes, shape, assembly=assembly, format=format)

    return MixtureOfExperts(
        placement,
        sizes,
        router=router,
        gate_up=matrices(gate_up, (sizes.hidden, 2, sizes.width), True),
        down=matrices(down, (sizes.width, sizes.hidden), False),
        gate=gate,
        biases=(f"{gate_up}_bias", f"{down}_bias"),
    )
