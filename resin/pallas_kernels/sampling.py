"""One token a row from logits: greedy, temperature, top-k, top-p, min-p as `draw` defines them. B rows, V tokens.

Three kernels:
1. `survey`, grid (V / 2048, B): the largest value of every span of 64 tokens, each program's softmax sums, and for
   rows that nothing cuts the best (noisy) value and its token.
2. `choose`, grid (B): a row that is cut keeps the spans that reach the k-th largest span maximum (at least k tokens
   lie at or above it, and none above it lies elsewhere), loads those few spans into registers, and finds each cut
   there. Without top_k it keeps the best 128 spans and checks that the cut falls inside them.
3. `sampling_general`, for cuts that do not fit 128 spans: top_k above 128, a nucleus wider than the spans, many equal
   logits. `choose` marks those rows by GENERAL.

The logits are read once: 64 rows of 200k tokens take 12 us of bandwidth.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.draw import (
    SIGN,
    Draw,
    Keep,
    gumbel,
    heaviest,
    is_cut,
    ordered,
    row_keys,
    tempered,
    threshold,
    with_fault,
)
from resin.pallas_kernels.sampling_general import GENERAL, finish_tokens
from resin.pallas_kernels.tiles import NOWHERE

SPAN_TOKENS = 64
SURVEY_SPANS = 32  # spans a survey program
KEPT_SPANS = 128  # 8192 tokens: 16 a thread of the choose kernel


def sample_tokens(logits: jax.Array, draw: Draw, *, interpret: bool = False) -> jax.Array:
    """One token a row.

    Args:
        logits: float32 `[B, V]`.
        draw: how each row is drawn.
        interpret: run the kernel bodies in Pallas' interpreter.

    Returns:
        int32 `[B]`; a RowFault where nothing can be chosen.
    """
    draw = _strict(draw)
    return finish_tokens(choose_tokens(logits, draw, interpret=interpret), logits, draw, interpret=interpret)


def _strict(draw: Draw) -> Draw:
    """Columns of exact dtypes: Pallas Triton mislowers `where` of weakly typed scalars."""
    floats = ("temperature", "top_p", "min_p")
    return Draw(
        *(jnp.asarray(value, "float32" if name in floats else "int32") for name, value in draw._asdict().items())
    )


def choose_tokens(logits: jax.Array, draw: Draw, *, interpret: bool = False) -> jax.Array:
    """`sample_tokens` with GENERAL in place of the token where the row needs the general kernel."""
    return _call(_Spec(logits.shape[0], logits.shape[1], interpret), logits, draw)


@dataclass(frozen=True, slots=True)
class _Spec:
    """Everything static about one call."""

    rows: int
    vocab: int
    interpret: bool

    @property
    def chunks(self) -> int:
        """Survey programs a row."""
        return -(-self.vocab // (SPAN_TOKENS * SURVEY_SPANS))

    @property
    def spans(self) -> int:
        return self.chunks * SURVEY_SPANS


@functools.partial(jax.jit, static_argnums=0)
def _call(spec: _Spec, logits: jax.Array, draw: Draw) -> jax.Array:
    keys = row_keys(draw.seed_low, draw.seed_high, draw.positions)
    cuts = is_cut(draw, spec.vocab).astype(jnp.int32)
    floats = jax.ShapeDtypeStruct((spec.rows, spec.chunks), jnp.float32)
    maxima, *chunk = pl.pallas_call(
        functools.partial(_survey_kernel, spec=spec),
        grid=(spec.chunks, spec.rows),
        out_shape=(
            jax.ShapeDtypeStruct((spec.rows, spec.spans), jnp.float32),
            floats,
            floats,
            floats,
            jax.ShapeDtypeStruct((spec.rows, spec.chunks), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=spec.interpret,
        name="sampling_survey",
    )(logits, draw.temperature, cuts, keys)
    tokens, _ = pl.pallas_call(
        functools.partial(_choose_kernel, spec=spec),
        grid=(spec.rows,),
        out_shape=(
            jax.ShapeDtypeStruct((spec.rows,), jnp.int32),
            jax.ShapeDtypeStruct((spec.rows, KEPT_SPANS), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=spec.interpret,
        name="sampling_choose",
    )(logits, draw.temperature, draw.top_k, draw.top_p, draw.min_p, cuts, keys, maxima, *chunk)
    return tokens


def _survey_kernel(
    logits_ref, temperature_ref, cuts_ref, keys_ref, maxima_ref, top_ref, mass_ref, best_ref, token_ref, *, spec: _Spec
):
    chunk, row = pl.program_id(0), pl.program_id(1)
    span = chunk * SURVEY_SPANS + jnp.arange(SURVEY_SPANS, dtype=jnp.int32)
    ids = span[:, None] * SPAN_TOKENS + jnp.arange(SPAN_TOKENS, dtype=jnp.int32)[None, :]
    temperature = temperature_ref[row]
    values = _scaled(logits_ref, temperature, row, ids, spec)
    maxima = jnp.max(values, axis=1)
    plgpu.store(maxima_ref.at[row, span], maxima)
    top = jnp.max(maxima)

    @pl.when(cuts_ref[row] != 0)
    def _():
        top_ref[row, chunk] = top
        mass_ref[row, chunk] = _total(jnp.exp(values - jnp.where(top == -jnp.inf, jnp.float32(0), top)))

    @pl.when(cuts_ref[row] == 0)
    def _():
        noise = jnp.where(temperature > 0, gumbel(keys_ref[row], ids), 0.0)
        best, token = _first_best(values + noise, ids)
        best_ref[row, chunk] = best
        token_ref[row, chunk] = token


def _scaled(logits_ref, temperature, row, ids, spec: _Spec):
    """Logits over the temperature (greedy rows: as they are), -inf past the vocabulary, +inf for NaN."""
    values = plgpu.load(logits_ref.at[row, ids], mask=ids < spec.vocab, other=-jnp.inf)
    return tempered(values, jnp.where(temperature > 0, temperature, 1.0))


def _first_best(values, ids):
    """The largest value of a tile and the lowest id that has it."""
    best = jnp.max(jnp.max(values, axis=1))
    return best, jnp.min(jnp.min(jnp.where(values == best, ids, NOWHERE), axis=1))


def _total(tile):
    """Sum of a tile of one or two dimensions, one axis at a time (two at once do not lower under a mesh)."""
    return jnp.sum(tile if tile.ndim == 1 else jnp.sum(tile, axis=1))


def _choose_kernel(
    logits_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, cuts_ref, keys_ref, maxima_ref, top_ref, mass_ref,
    best_ref, chunk_token_ref, token_ref, kept_ref, *, spec: _Spec,
):  # fmt: skip
    row = pl.program_id(0)
    chunk = jnp.arange(pl.next_power_of_2(spec.chunks), dtype=jnp.int32)
    live = chunk < spec.chunks

    @pl.when(cuts_ref[row] == 0)
    def _():
        best = plgpu.load(best_ref.at[row, chunk], mask=live, other=-jnp.inf)
        token = plgpu.load(chunk_token_ref.at[row, chunk], mask=live, other=NOWHERE)
        top = jnp.max(best)
        token_ref[row] = with_fault(jnp.min(jnp.where(best == top, token, NOWHERE)), top)

    @pl.when(cuts_ref[row] != 0)
    def _():
        tops = plgpu.load(top_ref.at[row, chunk], mask=live, other=-jnp.inf)
        masses = plgpu.load(mass_ref.at[row, chunk], mask=live, other=0.0)
        top = jnp.max(tops)
        all_mass = jnp.sum(masses * jnp.exp(tops - top))
        top_k = top_k_ref[row]
        limited = (top_k > 0) & (top_k < spec.vocab)
        wanted = jnp.minimum(jnp.where(limited, top_k, KEPT_SPANS), spec.spans)
        floor, count = _keep_spans(maxima_ref, kept_ref, row, wanted, spec)
        kept = plgpu.load(kept_ref.at[row, jnp.arange(KEPT_SPANS, dtype=jnp.int32)])
        ids = kept[:, None] * SPAN_TOKENS + jnp.arange(SPAN_TOKENS, dtype=jnp.int32)[None, :]
        # Unused places repeat span 0; only the first `count` are real.
        real = (jnp.arange(KEPT_SPANS, dtype=jnp.int32) < count)[:, None] & (ids >= 0)
        values = jnp.where(real, _scaled(logits_ref, temperature_ref[row], row, ids, spec), -jnp.inf)
        order = jnp.where(real, ordered(values), SIGN)
        # Only tokens at or above the floor are sure to be complete.
        inside = real & (order >= floor)

        def cut(weights, target):
            weigh, is_tied = _tile_sums(order, ids, weights)
            return heaviest(weigh, is_tied, target, spec.vocab)(order, ids)

        inside &= cut(jnp.where(inside, 1.0, 0.0), jnp.where(limited, top_k.astype(jnp.float32), jnp.inf))
        mass = jnp.where(inside, jnp.exp(values - top), 0.0)
        here = _total(mass)
        total = jnp.where(limited, here, all_mass)
        target = jnp.where(top_p_ref[row] < 1, top_p_ref[row] * total, jnp.inf)
        inside &= cut(mass, target)
        inside &= mass >= min_p_ref[row]
        complete = limited | (here >= target) | (spec.spans <= KEPT_SPANS)
        complete |= _mass_below(floor, top) < min_p_ref[row]
        _, token = _first_best(jnp.where(inside, values + gumbel(keys_ref[row], ids), -jnp.inf), ids)
        exact = complete & (count <= KEPT_SPANS) & (top_k <= KEPT_SPANS)
        token_ref[row] = with_fault(jnp.where(exact, token, jnp.int32(GENERAL)), top)


def _tile_sums(order, ids, weights):
    """`weigh` and `is_tied` of `heaviest` for a tile in registers; tokens without weight count nowhere."""

    def weigh(keep: Keep):
        return _total(jnp.where(keep(order, ids), weights, 0.0))

    def is_tied(key):
        return _total(((order == key) & (weights > 0)).astype(jnp.int32)) > 1

    return weigh, is_tied


def _mass_below(floor, top):
    """Largest weight that a token below the floor can have."""
    bits = jnp.where(floor < 0, floor ^ 0x7FFFFFFF, floor)
    return jnp.exp(lax.bitcast_convert_type(bits, jnp.float32) - top)


def _keep_spans(maxima_ref, kept_ref, row, wanted, spec: _Spec):
    """Stores the spans whose maximum reaches the `wanted`-th largest; returns that maximum's key and their count."""
    span = jnp.arange(pl.next_power_of_2(spec.spans), dtype=jnp.int32)
    live = span < spec.spans
    maxima = plgpu.load(maxima_ref.at[row, span], mask=live, other=-jnp.inf)
    order = jnp.where(live, ordered(maxima), SIGN)
    weigh, _ = _tile_sums(order, span, jnp.where(live, 1.0, 0.0))
    floor = threshold(weigh, wanted.astype(jnp.float32))
    chosen = live & (order >= floor)
    place = jnp.cumsum(chosen.astype(jnp.int32)) - 1
    first = jnp.arange(KEPT_SPANS, dtype=jnp.int32)
    plgpu.store(kept_ref.at[row, first], jnp.zeros_like(first))
    if not spec.interpret:
        plgpu.debug_barrier()
    stored = chosen & (place < KEPT_SPANS)
    plgpu.store(kept_ref.at[row, jnp.where(stored, place, NOWHERE)], span, mask=stored)
    if not spec.interpret:
        plgpu.debug_barrier()  # other threads read the list next
    return floor, jnp.sum(chosen.astype(jnp.int32))
