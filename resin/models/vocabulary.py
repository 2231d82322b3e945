"""Token embedding and language-model head, tied or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from resin.models.assemblies import Transposed
from resin.models.axes import Axis
from resin.models.declare import Init, Placement, declare
from resin.models.forward import Pass


class Vocabulary(nnx.Module):
    """Ids to vectors and vectors to logits.

    The head is stored `[hidden, vocab]`, also when it is tied: the other way halves decode speed on CPU. A tied
    embedding then gathers columns. Both are cut along the vocabulary where tp divides it.

    Args:
        placement: dtype and mesh.
        vocab_size: rows of the embedding.
        hidden: width of the residual stream.
        tied: one table for both.
        embedding, head: checkpoint prefixes.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        vocab_size: int,
        hidden: int,
        tied: bool,
        embedding: str = "model.embed_tokens",
        head: str = "lm_head",
    ) -> None:
        self.tied = tied
        self.cut = placement.mesh.tp > 1 and vocab_size % placement.mesh.tp == 0
        axis = Axis.VOCAB if self.cut else None
        self.head = declare(
            (hidden, vocab_size),
            placement,
            f"{embedding if tied else head}.weight",
            assembly=Transposed(),
            axes=(None, axis),
            # A matrix of the usual scale, also where it embeds: logits of unit deviation, which is what checks assume.
        )
        self.table = (
            None
            if tied
            else declare(
                (vocab_size, hidden),
                placement,
                f"{embedding}.weight",
                axes=(axis, None),
                init=Init(std=1.0),
                inner=0,
                token_share=1 / vocab_size,
            )
        )

    def embed(self, run: Pass) -> jax.Array:
        """Vectors of the pass's tokens, `[T, hidden]`."""
        with jax.named_scope("embed"):
            ids = run.tokens.ids
            if not self.cut:
                return self._lookup(ids)
            share = self.head.shape[1]
            local = ids - run.axes.index(Axis.VOCAB) * share
            mine = (local >= 0) & (local < share)
            rows = self._lookup(jnp.where(mine, local, 0))
            return run.axes.leave(jnp.where(mine[:, None], rows, 0), Axis.VOCAB)

    def _lookup(self, ids: jax.Array) -> jax.Array:
        if self.table is not None:
            return self.table[...].at[ids].get(mode="clip")
        return self.head[...].at[:, ids].get(mode="clip").T

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[rows, vocab]` of `[rows, hidden]`: all rows, or this device's share (`Pass.shares_rows`)."""
        with jax.named_scope("head"):
            if not self.cut:
                hidden = run.axes.own_rows(hidden, Axis.VOCAB) if run.shares_rows else hidden
                return run.ops.linear(hidden, self.head[...], out_dtype="float32")
            share = run.ops.linear(hidden, self.head[...], out_dtype="float32")
            return (run.axes.exchange if run.shares_rows else run.axes.join)(share, Axis.VOCAB)
