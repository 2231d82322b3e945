"""What a forward pass hands to every layer: its tokens, the cache, the operations of the device, and the mesh.

Layers are written once against `Pass`. The cache decides whether it is one whole sequence or a plan over the arena, the
operations whether products are kernels or plain XLA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from jax import lax

from resin.models.axes import Axes, Axis
from resin.models.cache.dense import DenseCache
from resin.models.cache.protocol import Cache
from resin.models.ops.protocol import Ops
from resin.models.ops.xla import XlaOps
from resin.models.rope import Rope
from resin.models.tokens import Tokens


@dataclass(slots=True)
class Pass:
    """One forward pass while it is traced.

    Attributes:
        tokens: what it computes.
        cache: what earlier tokens left, and what these leave.
        ops: how products are computed.
        axes: how weights and activations are cut over the mesh.
        context_tokens: longest sequence that the cache is for, which some rotations go by.
        shares_rows: devices that share the vocabulary make logits of a share of the rows each, all tokens of it.
    """

    tokens: Tokens
    cache: Cache
    ops: Ops
    axes: Axes = field(default_factory=Axes)
    context_tokens: int = 0
    shares_rows: bool = False
    _rotations: dict[Rope, tuple[jax.Array, jax.Array]] = field(default_factory=dict, init=False)

    def rotation(self, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """cos and sin `[T, D/2]` of this pass, made once for all layers."""
        if rope not in self._rotations:
            # Without the barrier XLA fuses the sines into every layer's rotation and computes them again for each head.
            rotation = rope.rotation(self.tokens.positions, self.context_tokens)
            self._rotations[rope] = lax.optimization_barrier(rotation)
        return self._rotations[rope]

    def row_parallel(
        self,
        axis: Axis,
        x: jax.Array,
        weight: jax.Array,
        *,
        bias: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """`residual + x @ weight + bias`, where devices share the inner dimension.

        Args:
            axis: what the inner dimension counts.
            x, weight: this device's share, [T, in] and [in, out].
            bias, residual: [out] and [T, out], whole on every device.
        """
        if self.axes.size(axis) == 1:
            return self.ops.linear(x, weight, bias=bias, residual=residual)
        out = self.axes.leave(self.ops.linear(x, weight), axis)
        out = out if bias is None else out + bias[None, :]
        return out if residual is None else residual + out


def dense_pass(
    token_ids: jax.Array,
    *,
    axes: Axes | None = None,
    fp8_scales: Mapping[str, float] | None = None,
    context_tokens: int | None = None,
) -> Pass:
    """One whole sequence in plain XLA, nothing remembered: for training, goldens and tests.

    Args:
        token_ids: int32 [T].
        axes: of the mesh that it runs on; None for one device.
        fp8_scales: by cache group; its keys and values are rounded as a cache of 8-bit floats would round them.
        context_tokens: as in `Pass`; None for this sequence's length.
    """
    tokens = Tokens.whole_sequence(token_ids)
    cache = DenseCache(tokens.positions, fp8_scales or {})
    longest = len(token_ids) if context_tokens is None else context_tokens
    return Pass(tokens, cache, XlaOps(), axes or Axes(), context_tokens=longest)
