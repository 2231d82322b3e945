"""What a plan must move and compute, and how fast this device moves and computes: the two sides of a roofline.

Work is counted from the model's declarations and from a recording of its layers, never from a table of shapes.
T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.cpu_limits import last_level_cache_bytes, product_rate, read_rate, reading_arrays, usable_cores
from resin import BatchPlan, RowFlag, RunnerConfig
from resin.models.cache.attended import Attended
from resin.models.cache.protocol import Attend, Heads, PlaneRef
from resin.models.forward import Pass
from resin.models.ops.xla import XlaOps
from resin.models.tokens import Tokens
from resin.models.weights import AbstractModel

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint16": 2}


# -- the device -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of one device.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by a copy of an array several times the last-level cache; on a
            CPU the better of a copy in place and of reading with every core.
        matmul_flops_per_s: a square matrix product of random values in the run's dtype, float32 accumulation; on a CPU
            in float32 the better of XLA's and NumPy's.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


class CeilingProbe:
    """Measures both ceilings again and again, so that they share a run's weather with what is compared to them.

    Args:
        dtype: of the matrix product.
        copy_bytes: size of the copied array; None takes 1 GiB on a GPU, four times the largest cache on a CPU.
        matmul_size: rows of the square matrices; None takes 8192 on a GPU, on a CPU 1024 for up to three cores and
            twice that for each four times as many.
    """

    def __init__(self, dtype: str, *, copy_bytes: int | None = None, matmul_size: int | None = None) -> None:
        on_cpu = jax.default_backend() == "cpu"
        cores = usable_cores()
        size = matmul_size or (1024 << (cores.bit_length() - 1) // 2 if on_cpu else 8192)
        words = (copy_bytes or (max(128 << 20, 4 * last_level_cache_bytes()) if on_cpu else (1 << 30))) // 4
        keys = jax.random.split(jax.random.key(0), 3)
        self._source = jax.random.bits(keys[0], (words,), jnp.uint32)
        self._left, self._right = (jax.random.normal(key, (size, size), jnp.dtype(dtype)) for key in keys[1:])
        # A new array costs a CPU more than the copy itself, page by page: the old one takes the result.
        self.copy = jax.jit(lambda x: x + jnp.uint32(1), donate_argnums=0 if on_cpu else ())
        self._product = jax.jit(lambda a, b: a @ b)
        self._host: tuple[list[np.ndarray], np.ndarray] | None = None
        if on_cpu:
            self._host = reading_arrays(cores, self._source.nbytes), np.asarray(self._left)
        self._seen: list[Ceilings] = []

    def measure(self, target_s: float = 0.05) -> Ceilings:
        """One burst of each, about `target_s` long."""
        copied, multiplied = 2 * self._source.nbytes, 2 * self._left.shape[0] ** 3
        rate = copied / paced_burst_s(self._copy_source, target_s)
        flops = multiplied / paced_burst_s(lambda: self._product(self._left, self._right), target_s)
        if self._host is not None:
            arrays, matrix = self._host
            rate = max(rate, read_rate(arrays))
            if matrix.dtype == np.float32:
                flops = max(flops, product_rate(matrix, matrix))
        self._seen.append(Ceilings(rate, flops))
        return self._seen[-1]

    def _copy_source(self) -> jax.Array:
        """In place, the array that was given away must not be used again."""
        copy = self.copy(self._source)
        if self._host is not None:
            self._source = copy
        return copy

    def settled(self) -> Ceilings:
        """Medians of everything measured so far; on a CPU, which is never alone, the best."""
        quantile = 0.5 if self._host is None else 1.0
        return Ceilings(
            float(np.quantile([seen.copy_bytes_per_s for seen in self._seen], quantile)),
            float(np.quantile([seen.matmul_flops_per_s for seen in self._seen], quantile)),
        )


def paced_burst_s(launch: Callable[[], Any], target_s: float) -> float:
    """Seconds a launch, over a burst that lasts about `target_s`; the first launches only warm up and set the pace."""
    jax.block_until_ready(launch())
    return burst_s(launch, launches_within(launch, target_s))


def launches_within(launch: Callable[[], Any], target_s: float) -> int:
    """How many launches fill `target_s`, from 4 to 1000."""
    return max(4, min(1000, round(target_s / max(burst_s(launch, 3), 1e-6))))


def burst_s(launch: Callable[[], Any], count: int) -> float:
    """Seconds that a launch adds to a queue of `count` others, of which only the last is waited for.

    The time of a single launch is taken off: it holds what a queue pays once, the host's first call and the wait at the
    end, 1 to 2 ms on a GPU.
    """
    once_s, queued_s = _queued_s(launch, 1), _queued_s(launch, 1 + count)
    return (queued_s - once_s) / count if queued_s > once_s else queued_s / (1 + count)


def _queued_s(launch: Callable[[], Any], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        last = launch()
    jax.block_until_ready(last)
    return time.perf_counter() - started


# -- the work ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What one plan cannot do without: each byte counted once, intermediate values not at all.

    Attributes:
        weight_bytes: weights that the plan's tokens read: of a table its rows, of experts those that somebody takes.
        cache_read_bytes: keys, values and states that were there before.
        cache_write_bytes: those of the plan's own tokens.
        flops: multiply-adds times two of products with weights and of causal attention.
    """

    weight_bytes: int
    cache_read_bytes: int
    cache_write_bytes: int
    flops: int

    @property
    def nbytes(self) -> int:
        return self.weight_bytes + self.cache_read_bytes + self.cache_write_bytes

    def limit_s(self, ceilings: Ceilings) -> float:
        """The least time: bytes at the copy rate or operations at the product's rate, whichever takes longer."""
        return max(self.nbytes / ceilings.copy_bytes_per_s, self.flops / ceilings.matmul_flops_per_s)


class AppendUse(NamedTuple):
    """Entries that a layer leaves for every token."""

    plane: PlaneRef


class AttendUse(NamedTuple):
    """One attention: the keys and values that it reads, with H queries of `keys.width`."""

    keys: PlaneRef
    values: PlaneRef
    how: Attend
    heads: int


class StateUse(NamedTuple):
    """States of each sequence that a layer reads, and leaves moved on."""

    state: PlaneRef


Use = AppendUse | AttendUse | StateUse


class RecordingCache:
    """Notes what layers ask of the cache and computes nothing. The methods are those of `Cache`."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def append(self, plane: PlaneRef, vectors: jax.Array) -> None:
        self.uses.append(AppendUse(plane))

    def target(self, plane: PlaneRef, how: Attend, sinks: jax.Array | None) -> None:
        return None

    def append_heads(self, plane: PlaneRef, heads: Heads) -> None:
        self.uses.append(AppendUse(plane))

    def attend(
        self,
        query: jax.Array,
        keys: PlaneRef,
        values: PlaneRef,
        how: Attend,
        *,
        sinks: jax.Array | None = None,
        with_lse: bool = False,
    ) -> Attended:
        tokens, heads, _ = query.shape
        self.uses.append(AttendUse(keys, values, how, heads))
        out = jnp.zeros((tokens, heads, values.width), query.dtype)
        return Attended(out, jnp.zeros((tokens, heads), jnp.float32))

    def read_state(self, state: PlaneRef, dtype: jax.typing.DTypeLike) -> jax.Array:
        self.uses.append(StateUse(state))
        return jnp.zeros((1, state.rows, state.width), dtype)

    def write_state(self, state: PlaneRef, value: jax.Array) -> None:
        """Counted where it was read."""

    def shift_state(self, state: PlaneRef, x: jax.Array) -> list[jax.Array]:
        self.uses.append(StateUse(state))
        return [x] * state.rows


def recording_pass(token_ids: jax.Array) -> tuple[Pass, RecordingCache]:
    """A pass in plain XLA whose cache computes nothing."""
    cache = RecordingCache()
    return Pass(Tokens.whole_sequence(token_ids), cache, XlaOps()), cache


def layer_uses(model: AbstractModel) -> tuple[Use, ...]:
    """Every use of the cache in one forward pass, in order; nothing is computed."""
    uses: list[Use] = []

    def forward(weights: Sequence[jax.Array], token_ids: jax.Array) -> jax.Array:
        run, cache = recording_pass(token_ids)
        hidden = model.merge(weights)(run)
        uses.extend(cache.uses)
        return hidden

    jax.eval_shape(forward, *_abstract_arguments(model))
    return tuple(uses)


def head_flops(model: AbstractModel) -> int:
    """Operations of all products between one hidden state and its logits."""

    def logits(weights: Sequence[jax.Array], token_ids: jax.Array) -> jax.Array:
        run, _ = recording_pass(token_ids)
        return model.merge(weights).logits(run, hidden(weights, token_ids))

    def hidden(weights: Sequence[jax.Array], token_ids: jax.Array) -> jax.Array:
        return model.merge(weights)(recording_pass(token_ids)[0])

    weights, token_ids = _abstract_arguments(model)
    whole, body = (jax.make_jaxpr(function)(weights, token_ids) for function in (logits, hidden))
    return _product_flops(whole.jaxpr) - _product_flops(body.jaxpr)


def _abstract_arguments(model: AbstractModel) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    weights = [jax.ShapeDtypeStruct(item.shape, item.dtype) for item in model.declarations]
    return weights, jax.ShapeDtypeStruct((1,), np.int32)


def _product_flops(jaxpr: Any) -> int:
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            flops += 2 * inner * equation.outvars[0].aval.size
        for value in equation.params.values():
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                flops += _product_flops(inside)
    return flops


class WorkCounter:
    """Counts the work of plans of one model.

    Args:
        model: declarations and structure.
        config: the runner's groups and arena dtype.
        balanced: tokens take experts in turn instead of at random.
    """

    def __init__(self, model: AbstractModel, config: RunnerConfig, *, balanced: bool = False) -> None:
        self._model = model
        self._config = config
        self._balanced = balanced
        self._uses = layer_uses(model)
        self._head_flops = head_flops(model)
        self._token_flops = model.flops_per_token - self._head_flops

    def count(self, plan: BatchPlan) -> Work:
        """The work of one plan."""
        rows = plan.num_sequences
        totals = plan.seq_lens[:rows].astype(np.int64)
        queries = np.diff(plan.query_indptr[: rows + 1]).astype(np.int64)
        fresh = (plan.row_flags[:rows] & RowFlag.FRESH_STATE) != 0
        read = written = 0
        # The head multiplies the last token of each sequence alone.
        flops = plan.num_tokens * self._token_flops + int(plan.emits.sum()) * self._head_flops
        for use in self._uses:
            if isinstance(use, StateUse):
                state = self._vector_bytes(use.state)
                read += state * int((~fresh).sum())
                written += state * rows
            elif isinstance(use, AppendUse):
                written += self._vector_bytes(use.plane) * plan.num_tokens
            else:
                entry = self._vector_bytes(use.keys) + self._vector_bytes(use.values)
                read += entry * int(_past_keys(totals, queries, use.how.window).sum())
                pairs = _pairs(totals, queries, use.how.window)
                flops += 2 * use.heads * (use.keys.width + use.values.width) * pairs
        return Work(self._weight_bytes(plan.num_tokens), read, written, flops)

    def _weight_bytes(self, tokens: int) -> int:
        if not self._balanced:
            return round(sum(item.touched_nbytes(tokens) for item in self._model.declarations))
        return round(sum(item.nbytes * min(1.0, item.token_share * tokens) for item in self._model.declarations))

    def _vector_bytes(self, ref: PlaneRef) -> int:
        """Of an entry's vectors, or a state's."""
        planes = {(group.name, plane.name): plane for group in self._config.groups for plane in group.planes}
        plane = planes[ref.group, ref.plane]
        return ref.rows * ref.width * ITEMSIZE[plane.dtype or self._config.arena_dtype]


def _past_keys(totals: np.ndarray, queries: np.ndarray, window: int | None) -> np.ndarray:
    """Keys a sequence that were there before the plan and that one of its queries sees."""
    past = totals - queries
    return past if window is None else np.minimum(past, window - 1)


def _pairs(totals: np.ndarray, queries: np.ndarray, window: int | None) -> int:
    """(query, visible key) pairs over all sequences."""
    pairs = 0
    for total, count in zip(totals.tolist(), queries.tolist(), strict=True):
        seen = np.arange(total - count, total) + 1
        pairs += int((seen if window is None else np.minimum(seen, window)).sum())
    return pairs
