"""The frame that every model shares: embedding, a stack of layers, a final norm, a head."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from resin.models.cache.protocol import PlaneRef
from resin.models.declare import Placement
from resin.models.forward import Pass
from resin.models.norm import NormOrder, RMSNorm
from resin.models.tying import HEAD, TABLE
from resin.models.vocabulary import Vocabulary
from resin.plan import Plane


class Decoder(nnx.Module):
    """Tokens to final hidden states, and hidden states to logits.

    A model sets `Config` and `Layer` and adds `cache_groups`. The config needs `vocab_size`, `hidden`, `layers` (their
    number), `norm_eps` and `tied`; a layer is built as `Layer(config, placement, index)` and maps `(run, carry)` to the
    carry of the next one. The carry is `[T, hidden]` unless the model overrides `open` and `close`.
    """

    Config: ClassVar[type[Any]]
    Layer: ClassVar[type[Any]]
    Norm: ClassVar[type[RMSNorm]] = RMSNorm
    norm_name: ClassVar[str] = "model.norm"
    norm_order: ClassVar[NormOrder] = NormOrder.CAST_THEN_SCALE
    norm_one_plus: ClassVar[bool] = False

    def __init__(self, config: Any, placement: Placement) -> None:
        self.vocabulary = Vocabulary(placement, vocab_size=config.vocab_size, hidden=config.hidden, tied=config.tied)
        self.layers = nnx.List([self.Layer(config, placement, index) for index in range(config.layers)])
        self.norm = self.Norm(
            placement, self.norm_name, config.hidden, config.norm_eps, self.norm_order, self.norm_one_plus
        )
        # Last parts of checkpoint names that need no home: old files store rope frequencies, some store a tied head.
        self.ignored_tensors = ("rotary_emb.inv_freq", *((HEAD,) if config.tied else ()))
        # Some store a tied head alone.
        self.other_names = {TABLE: HEAD} if config.tied else {}

    def open(self, run: Pass) -> Any:
        """What the first layer takes: vectors of the pass's tokens, `[T, hidden]`."""
        return self.vocabulary.embed(run)

    def close(self, run: Pass, carry: Any) -> jax.Array:
        """Final hidden states `[T, hidden]` of what the last layer left."""
        return self.norm(carry)

    def __call__(self, run: Pass) -> jax.Array:
        """Final hidden states `[T, hidden]` of the pass's tokens."""
        carry = self.open(run)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer{index}"):
                carry = layer(run, carry)
        return self.close(run, carry)

    def logits(self, run: Pass, hidden: jax.Array) -> jax.Array:
        """float32 `[..., vocab]` of `[..., hidden]`."""
        return self.vocabulary.logits(run, hidden)


def kv_plane(placement: Placement, layers: int, kv_heads: int, head_dim: int) -> Plane:
    """The plane "kv" of `layers` attention layers, as one device sees it."""
    return Plane("kv", layers * 2 * placement.split_kv(kv_heads), head_dim)


def kv_entries(placement: Placement, group: str, index: int, kv_heads: int, head_dim: int) -> PlaneRef:
    """The rows of layer `index` in that plane of a group: its keys, then its values."""
    return PlaneRef.of_layer(group, "kv", index, 2 * placement.split_kv(kv_heads), head_dim)
