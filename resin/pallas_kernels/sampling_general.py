"""The rows whose cuts do not fit `sampling`'s kernels: any cut of any width, by searching over the whole vocabulary.

One program a row; it leaves at once unless the row holds GENERAL. Otherwise every bit of each cut's threshold is one
pass over the row's V logits: 70 to 100 passes, in steps where such a row is present and in no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.draw import Draw, Keep, gumbel, heaviest, ordered, row_keys, tempered
from resin.pallas_kernels.tiles import NOWHERE

TILE_TOKENS = 4096  # 32 a thread of 4 warps
GENERAL = -3  # in place of a token: the row needs this kernel


def finish_tokens(tokens: jax.Array, logits: jax.Array, draw: Draw, *, interpret: bool = False) -> jax.Array:
    """Replaces every GENERAL by the row's token.

    Args:
        tokens: int32 `[B]`, as `sample_tokens` returns them: rows with a fault keep it.
        logits: float32 `[B, V]`.
        draw: how each row is drawn.
        interpret: run the kernel body in Pallas' interpreter.

    Returns:
        int32 `[B]`, none GENERAL.
    """
    rows, vocab = logits.shape
    keys = row_keys(draw.seed_low, draw.seed_high, draw.positions)
    return pl.pallas_call(
        functools.partial(_general_kernel, vocab=vocab),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="sampling_general",
    )(tokens, logits, draw.temperature, draw.top_k, draw.top_p, draw.min_p, keys)


def _general_kernel(
    tokens_ref, logits_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, keys_ref, out_ref, *, vocab: int
):
    row = pl.program_id(0)
    out_ref[row] = tokens_ref[row]

    @pl.when(tokens_ref[row] == GENERAL)
    def _():
        temperature, top_k = temperature_ref[row], top_k_ref[row]
        scale = jnp.where(temperature > 0, temperature, 1.0)

        def tile(index):
            ids = index * TILE_TOKENS + jnp.arange(TILE_TOKENS, dtype=jnp.int32)
            values = tempered(plgpu.load(logits_ref.at[row, ids], mask=ids < vocab, other=-jnp.inf), scale)
            return ids, values, ordered(values)

        def over_tiles(step: Callable, start):
            return lax.fori_loop(0, pl.cdiv(vocab, TILE_TOKENS), step, start)

        top = over_tiles(lambda index, best: jnp.maximum(best, jnp.max(tile(index)[1])), jnp.float32(-jnp.inf))

        def total(inside: Keep, weight_of: Callable):
            def add(index, so_far):
                ids, values, order = tile(index)
                return so_far + jnp.sum(jnp.where(inside(order, ids), weight_of(values), 0.0))

            return over_tiles(add, jnp.float32(0))

        def everything(order, ids):
            return ids < vocab

        def cut(inside: Keep, weight_of: Callable, target) -> Keep:
            """The shortest prefix of `inside` that weighs `target`."""

            def both(keep: Keep) -> Keep:
                return lambda order, ids: inside(order, ids) & keep(order, ids)

            def is_tied(key):
                return total(both(lambda order, ids: order == key), jnp.ones_like) > 1

            return both(heaviest(lambda keep: total(both(keep), weight_of), is_tied, target, vocab))

        def mass(values):
            return jnp.exp(values - top)

        limited = (top_k > 0) & (top_k < vocab)
        likely = cut(everything, jnp.ones_like, jnp.where(limited, top_k.astype(jnp.float32), jnp.inf))
        share = top_p_ref[row]
        nucleus = cut(likely, mass, jnp.where(share < 1, share * total(likely, mass), jnp.inf))

        def choose(index, best):
            ids, values, order = tile(index)
            kept = nucleus(order, ids) & (mass(values) >= min_p_ref[row])
            noisy = jnp.where(kept, values + gumbel(keys_ref[row], ids), -jnp.inf)
            here = jnp.max(noisy)
            token = jnp.min(jnp.where(noisy == here, ids, NOWHERE))
            value, chosen = best
            return jnp.maximum(value, here), jnp.where(here > value, token, chosen)

        _, token = over_tiles(choose, (jnp.float32(-jnp.inf), jnp.int32(0)))
        out_ref[row] = token
