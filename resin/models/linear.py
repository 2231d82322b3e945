"""Linear layers' matrices in a format, which says how their numbers are stored; what multiplies matches on it.

A matrix is declared as `[in, out]`, as `[in, parts, out]`, or with outputs that lie in more dimensions yet; a stack of
them has one more in front. Operations take it as `[in, out]` with all outputs side by side: a view of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import jax
from flax import nnx

from resin.models.assemblies import Assembly, Shape
from resin.models.axes import Axis
from resin.models.declare import Memory, Placement, Weight, declare


@dataclass(frozen=True, slots=True)
class Matrices:
    """What a format stores.

    Attributes:
        sources: checkpoint tensors; those of a packed form begin with the first one's name.
        shape: `[in, *out]`, or `[count, in, *out]` of a stack.
        assembly: how the tensors combine as plain numbers.
        axes: what each dimension counts.
        is_stack: whether there are many.
        flops_per_token, token_share, memory: as `declare` takes them.
    """

    sources: tuple[str, ...]
    shape: Shape
    assembly: Assembly | None
    axes: tuple[Axis | None, ...]
    is_stack: bool = False
    flops_per_token: int | None = None
    token_share: float = 1.0
    memory: Memory = "device"

    @property
    def inner(self) -> int:
        return self.shape[1 if self.is_stack else 0]

    @property
    def outer(self) -> int:
        """Outputs of one matrix."""
        return prod(self.shape[2 if self.is_stack else 1 :])


class Format(Protocol):
    """How matrices are stored. Frozen and hashable."""

    def declare(self, placement: Placement, matrices: Matrices) -> dict[str, Weight]:
        """The weights that hold them, by name."""
        ...

    def operand(self, weights: dict[str, jax.Array], is_stack: bool) -> Any:
        """What operations take; its type tells the format."""
        ...

    def decode(self, operand: Any, inner: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The numbers of an operand, `[..., in, out]`."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers of the model's dtype."""

    def declare(self, placement: Placement, matrices: Matrices) -> dict[str, Weight]:
        weight = declare(
            matrices.shape,
            placement,
            matrices.sources,
            assembly=matrices.assembly,
            axes=matrices.axes,
            inner=matrices.inner,
            flops_per_token=matrices.flops_per_token,
            token_share=matrices.token_share,
            memory=matrices.memory,
        )
        return {"weight": weight}

    def operand(self, weights: dict[str, jax.Array], is_stack: bool) -> jax.Array:
        """`[in, out]`, or `[count, in, out]`."""
        weight = weights["weight"]
        return weight.reshape(*weight.shape[: 2 if is_stack else 1], -1)

    def decode(self, operand: jax.Array, inner: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        return operand.astype(dtype)


PLAIN = Plain()


class Linear(nnx.Module):
    """The matrix of a linear layer, or a stack of them.

    Args:
        placement: dtype and mesh.
        sources: checkpoint tensors.
        shape: `[in, *out]`, or `[count, in, *out]` of a stack.
        assembly: how the tensors combine as plain numbers; None takes one tensor as it is.
        axes: what each dimension counts.
        format: how the numbers are stored.
        is_stack, flops_per_token, token_share, memory: as in `Matrices`.
    """

    def __init__(
        self,
        placement: Placement,
        sources: str | Sequence[str],
        shape: Shape,
        *,
        assembly: Assembly | None,
        axes: Sequence[Axis | None],
        format: Format = PLAIN,
        is_stack: bool = False,
        flops_per_token: int | None = None,
        token_share: float = 1.0,
        memory: Memory = "device",
    ) -> None:
        names = (sources,) if isinstance(sources, str) else tuple(sources)
        matrices = Matrices(names, shape, assembly, tuple(axes), is_stack, flops_per_token, token_share, memory)
        self.format = format
        self.is_stack = is_stack
        self.inner = matrices.inner
        weights = format.declare(placement, matrices)
        self.parts = tuple(weights)
        for name, weight in weights.items():
            setattr(self, name, weight)

    def operand(self) -> Any:
        """What operations take of this device's share."""
        return self.format.operand({name: getattr(self, name)[...] for name in self.parts}, self.is_stack)

    def matrix(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The numbers of this device's share, `[in, out]` or `[count, in, out]`."""
        operand = self.operand()
        return self.format.decode(operand, self.inner, dtype)
