"""A model that asks of a pass what no model of the library does."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import Transposed
from resin.models.axes import Axis
from resin.models.cache.attended import merge
from resin.models.cache.protocol import PlaneRef
from resin.models.declare import BIAS, Placement, declare
from resin.models.forward import Pass
from resin.models.llama import Llama, LlamaConfig, LlamaLayer
from resin.models.norm import RMSNorm
from resin.models.rope import rotate
from resin.plan import CacheGroup, Plane, StateGroup

Streams = tuple[jax.Array, jax.Array]


class OneStream(LlamaLayer):
    """Works on the first stream alone."""

    def __call__(self, run: Pass, carry: Streams) -> Streams:
        x, skip = carry
        return super().__call__(run, x), skip


class BothCaches(nnx.Module):
    """Has queries alone: attends to the keys of two other layers under one softmax with sinks, in the second stream."""

    def __init__(self, config: LlamaConfig, placement: Placement, index: int, others: tuple[LlamaLayer, ...]) -> None:
        name, width = f"model.layers.{index}.self_attn", config.heads * config.head_dim
        self.norm = RMSNorm(placement, f"model.layers.{index}.input_layernorm", config.hidden, config.norm_eps)
        query, output = (f"{name}.{part}_proj.weight" for part in "qo")
        shape = config.hidden, width
        self.query = declare(shape, placement, query, assembly=Transposed(), axes=(None, Axis.HEADS))
        self.output = declare(shape[::-1], placement, output, assembly=Transposed(), axes=(Axis.HEADS, None))
        self.sinks = declare((config.heads,), placement, f"{name}.sinks", axes=(Axis.HEADS,), init=BIAS)
        self.places = tuple((other.attention.entries, other.attention.how) for other in others)
        self.rope = config.rope

    def __call__(self, run: Pass, carry: Streams) -> Streams:
        x, skip = carry
        query = run.ops.linear(x + skip, self.query[...], norm=self.norm)
        query = rotate(query.reshape(len(x), -1, self.places[0][0].width), run.rotation(self.rope))
        parts = [run.cache.attend(query, *entries.halves(), how, with_lse=True) for entries, how in self.places]
        out = merge(parts, self.sinks[...]).out.reshape(len(x), -1)
        return x, run.row_parallel(Axis.HEADS, out, self.output[...], residual=skip)


class RunningMean(nnx.Module):
    """Adds to the first stream the mean of the second one over the sequence so far, kept as a sum."""

    def __init__(self, hidden: int) -> None:
        self.state = PlaneRef("sum", "sum", 0, 1, hidden)

    def __call__(self, run: Pass, carry: Streams) -> Streams:
        (x, skip), tokens = carry, run.tokens
        before = run.cache.read_state(self.state, jnp.float32)[:, 0]
        place = jnp.arange(len(x), dtype=jnp.int32)
        is_row = tokens.row[None, :] == jnp.arange(len(before), dtype=jnp.int32)[:, None]
        here = (is_row & tokens.live[None, :]).astype(jnp.float32)
        held = jnp.where(tokens.live[:, None], skip.astype(jnp.float32), 0)
        run.cache.write_state(self.state, (before + here @ held)[:, None])
        reaches = (tokens.row[:, None] == tokens.row[None, :]) & (place[:, None] >= place[None, :])
        total = before[tokens.row] + reaches.astype(jnp.float32) @ held
        return x + (total / (tokens.positions + 1).astype(jnp.float32)[:, None]).astype(x.dtype), skip


class TwoStreams(Llama):
    """Two layers of Llama, and two of the others; the carry is two arrays."""

    Layer: ClassVar[type[Any]] = OneStream

    def __init__(self, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        first, second = self.layers
        self.layers = nnx.List(
            [first, second, BothCaches(config, placement, 2, (first, second)), RunningMean(config.hidden)]
        )

    @staticmethod
    def cache_groups(config: LlamaConfig, placement: Placement) -> tuple[CacheGroup, ...]:
        return (*Llama.cache_groups(config, placement), StateGroup("sum", (Plane("sum", 1, config.hidden),)))

    def open(self, run: Pass) -> Streams:
        x = super().open(run)
        return x, x * 0.5

    def close(self, run: Pass, carry: Streams) -> jax.Array:
        return super().close(run, carry[0] + carry[1])
