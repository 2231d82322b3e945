"""From logits to one token a row: greedy, temperature, top-k, top-p, min-p, exact and without a sort. B rows, V tokens.

Order and ties are those of `SamplingParams`: divide by the temperature, cut by top_k, then top_p, then min_p, each on
what the one before left, then draw by adding Gumbel noise; equal values rank by token id, lowest first.

Two kernels:
1. `survey`, grid (V / 2048, B): the largest value of every span of 64 tokens, each program's softmax sums, and for
   rows that nothing cuts the best (noisy) value and its token.
2. `choose`, grid (B): a row that is cut keeps the spans that reach the k-th largest span maximum (at least k tokens
   lie at or above it, and none above it lies elsewhere), loads those few spans into registers, and finds each cut there
   bit by bit on integers that order as the floats do. Without top_k it keeps the best 128 spans and checks that the cut
   falls inside them.

A cut that does not fit 128 spans (top_k above 128, a nucleus wider than the spans, many equal logits) is reported by
GENERAL, for the caller's general path, and a row without a finite largest logit by a RowFault. The logits are read
once: 64 rows of 200k tokens take 12 us of bandwidth.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from resin.pallas_kernels.tiles import NOWHERE
from resin.plan import RowFault

SPAN_TOKENS = 64
SURVEY_SPANS = 32  # spans a survey program
KEPT_SPANS = 128  # 8192 tokens: 16 a thread of the choose kernel
SIGN = -(2**31)
GENERAL = -3  # in place of a token: the row needs the general path
MOST = float(jnp.finfo(jnp.float32).max)


class Draw(NamedTuple):
    """Per-row columns, all `[B]`. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 cut nothing."""

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    seed_low: jax.Array  # int32
    seed_high: jax.Array  # int32
    positions: jax.Array  # int32, position of the token to draw


def sample_tokens(logits: jax.Array, draw: Draw, *, interpret: bool = False) -> jax.Array:
    """One token a row.

    Args:
        logits: float32 `[B, V]`.
        draw: how each row is drawn.
        interpret: run the kernel bodies in Pallas' interpreter.

    Returns:
        int32 `[B]`; GENERAL where the row needs the general path, a RowFault where nothing can be chosen.
    """
    # Pallas Triton mislowers `where` of weakly typed scalars, which a column made from Python numbers has.
    floats = ("temperature", "top_p", "min_p")
    draw = Draw(
        *(jnp.asarray(value, "float32" if name in floats else "int32") for name, value in draw._asdict().items())
    )
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
    cuts = ((draw.top_k > 0) & (draw.top_k < spec.vocab)) | (draw.top_p < 1) | (draw.min_p > 0)
    cuts = (cuts & (draw.temperature > 0)).astype(jnp.int32)
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


def tempered(values, temperature):
    """Values over temperatures, those that were finite still so; +inf for NaN, which no maximum overlooks then."""
    values = jnp.where(values != values, jnp.inf, values)
    return jnp.where(jnp.abs(values) == jnp.inf, values, jnp.clip(values / temperature, -MOST, MOST))


def with_fault(token, top):
    """The token of a row whose largest value is `top`, or why it has none."""
    token = jnp.where(top == jnp.inf, jnp.int32(RowFault.NOT_FINITE), token)
    return jnp.where(top == -jnp.inf, jnp.int32(RowFault.NO_TOKEN), token)


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
        ones = jnp.where(inside, 1.0, 0.0)
        inside &= _heaviest(order, ids, ones, jnp.where(limited, top_k.astype(jnp.float32), jnp.inf))
        mass = jnp.where(inside, jnp.exp(values - top), 0.0)
        here = _total(mass)
        total = jnp.where(limited, here, all_mass)
        target = jnp.where(top_p_ref[row] < 1, top_p_ref[row] * total, jnp.inf)
        inside &= _heaviest(order, ids, mass, target)
        inside &= mass >= min_p_ref[row]
        complete = limited | (here >= target) | (spec.spans <= KEPT_SPANS)
        complete |= _mass_below(floor, top) < min_p_ref[row]
        _, token = _first_best(jnp.where(inside, values + gumbel(keys_ref[row], ids), -jnp.inf), ids)
        exact = complete & (count <= KEPT_SPANS) & (top_k <= KEPT_SPANS)
        token_ref[row] = with_fault(jnp.where(exact, token, jnp.int32(GENERAL)), top)


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
    weights = jnp.where(live, 1.0, 0.0)
    floor = _threshold(order, weights, wanted.astype(jnp.float32))
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


def ordered(values):
    """int32 that order as the floats do, -0.0 equal to 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _threshold(order, weights, target):
    """The largest key whose tokens at or above it weigh at least `target`; the smallest key if none does."""

    def raise_bit(step, found):
        higher = found | lax.shift_left(jnp.int32(1), 31 - step)
        weight = _total(jnp.where(order >= (higher ^ SIGN), weights, 0.0))
        return jnp.where(weight >= target, higher, found)

    return lax.fori_loop(0, 32, raise_bit, jnp.int32(0)) ^ SIGN


def _heaviest(order, ids, weights, target):
    """bool tile: the shortest prefix in the order (key falling, id rising) that weighs `target`; all if none does."""
    threshold = _threshold(order, weights, target)
    above, level = order > threshold, (order == threshold) & (weights > 0)

    def raise_bit(step, bound):
        higher = bound | lax.shift_left(jnp.int32(1), 30 - step)
        weight = _total(jnp.where(above | (level & (ids < higher)), weights, 0.0))
        return jnp.where(weight >= target, bound, higher)

    # The largest bound whose tokens do not yet reach the target; the token at the bound completes it.
    tied = _total(level.astype(jnp.int32)) > 1
    start = NOWHERE - NOWHERE * tied.astype(jnp.int32)
    bound = lax.cond(tied, lambda: lax.fori_loop(0, 31, raise_bit, start), lambda: start)
    return above | (level & (ids <= bound))


def row_keys(seed_low: jax.Array, seed_high: jax.Array, positions: jax.Array) -> jax.Array:
    """uint32 `[B]`, the noise key of each row: a function of (seed, position) alone."""
    key = _mix(seed_low.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))
    key = _mix(key ^ _mix(seed_high.astype(jnp.uint32) + jnp.uint32(0x7F4A7C15)))
    return _mix(key ^ _mix(positions.astype(jnp.uint32) + jnp.uint32(0x85EBCA77)))


def gumbel(key: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 standard Gumbel noise of token ids under a row's key (scalars or arrays that broadcast).

    Rounds of a 32-bit finaliser (the shifts and factors of MurmurHash3's): the same integers on every device and
    version. -log(-log1p(-u)) is exact where it matters, at small u.
    """
    bits = _mix(_mix(key ^ (ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))) + key)
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def sample_tokens_ref(logits: jax.Array, draw: Draw) -> jax.Array:
    """The same in plain XLA with a sort; never GENERAL. Arguments and result as in `sample_tokens`."""
    vocab = logits.shape[1]
    sampled = draw.temperature > 0
    values = tempered(logits, jnp.where(sampled, draw.temperature, 1.0)[:, None])
    top = values.max(axis=1)
    ids = jnp.argsort(-values, axis=1, stable=True).astype(jnp.int32)
    values = jnp.take_along_axis(values, ids, axis=1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    wanted = jnp.where((draw.top_k > 0) & (draw.top_k < vocab), draw.top_k, vocab)
    mass = jnp.where(rank < wanted[:, None], jnp.exp(values - values[:, :1]), 0.0)
    before = jnp.cumsum(mass, axis=1) - mass
    target = jnp.where(draw.top_p < 1, draw.top_p * mass.sum(1), jnp.inf)
    kept = (rank < wanted[:, None]) & (before < target[:, None]) & (mass >= draw.min_p[:, None])
    noise = gumbel(row_keys(draw.seed_low, draw.seed_high, draw.positions)[:, None], ids)
    noisy = jnp.where(kept, values + noise, -jnp.inf)
    best = jnp.min(jnp.where(noisy == noisy.max(1, keepdims=True), ids, vocab), axis=1)
    return with_fault(jnp.where(sampled, best, ids[:, 0]), top)
