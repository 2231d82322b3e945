"""Checks of the attention kernels over head and group sizes, each with inputs of its own; on a GPU or interpreted."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from resin.pallas_kernels.dense_tiles import DenseTiles
from resin.pallas_kernels.heads import NewTokens
from resin.pallas_kernels.paged_decode import DecodeTiles, paged_decode_attention
from resin.pallas_kernels.paged_prefill import paged_prefill_attention
from resin.pallas_kernels.project_heads import project_heads
from resin.pallas_kernels.rope_append import rope_append
from tests.pallas_kernels.paged_cases import (
    PagedCase,
    build_case,
    by_sequence,
    dense_attention,
    dense_softmax,
    fp8_case,
    relative_error,
)
from tests.pallas_kernels.references import project_heads_ref, rope_append_ref

HEAD_SIZES = (64, 80, 96, 128, 256)
RATIOS = (1, 2, 3, 4, 7, 8, 16)
BF16_ERROR = 1e-2

# window, sinks, softcap: a point of the grid takes one of them in turn.
VARIANTS = [(None, False, None), (20, True, None), (None, True, None), (100, False, 50.0), (5, True, 30.0)]
TILES = [None, DecodeTiles(32, 1), DecodeTiles(64, 5, num_stages=3)]


@dataclass(frozen=True)
class Point:
    """A place in the grid; `index` picks the variant."""

    width: int
    ratio: int
    index: int
    fp8_scale: float | None = None

    @property
    def kv_heads(self) -> int:
        return 1 + self.index % 3

    @property
    def page_entries(self) -> int:
        return (16, 24, 32)[self.index % 3]

    def __str__(self) -> str:
        return f"{self.width}x{self.ratio}" + ("" if self.fp8_scale is None else " fp8")


GRID = [
    Point(width, ratio, index)
    for index, (width, ratio) in enumerate((width, ratio) for width in HEAD_SIZES for ratio in RATIOS)
]
FP8_GRID = [
    Point(width, ratio, index, fp8_scale=(1.0, 0.25)[index % 2])
    for index, (width, ratio) in enumerate((width, ratio) for width in HEAD_SIZES for ratio in (1, 4))
]


def fresh_seed() -> int:
    """A seed that no run had before; checks name it when they fail."""
    return secrets.randbits(31)


def poison_memory() -> None:
    """Leaves NaN in the memory that outputs and temporaries of the next program will be allocated from."""
    sizes = [1 << power for power in (10, 14, 18, 22, 24) for _ in range(4)]
    jax.block_until_ready([jnp.full(size, jnp.nan, jnp.float32) for size in sizes])


def paged_case(point: Point, lengths: list[int], queries: list[int], seed: int) -> tuple[PagedCase, dict[str, Any]]:
    """A case in bfloat16 or 8 bits, and the kernel's options; what no sequence owns is NaN."""
    window, has_sinks, softcap = VARIANTS[point.index % len(VARIANTS)]
    case = build_case(
        lengths,
        queries,
        heads=point.ratio * point.kv_heads,
        kv_heads=point.kv_heads,
        width=point.width,
        page_entries=point.page_entries,
        window=window,
        padding_tokens=3 if max(queries) > 1 else 0,
        seed=seed,
    )
    case = replace(case, q=case.q.astype(ml_dtypes.bfloat16))
    if point.fp8_scale is not None:
        case = fp8_case(case, point.fp8_scale)
    else:
        rounded = {
            name: tuple(part.astype(ml_dtypes.bfloat16).astype(np.float64) for part in getattr(case, name))
            for name in ("keys", "values")
        }
        case = replace(case, arena=case.arena.astype(ml_dtypes.bfloat16), **rounded)
    sinks = np.random.default_rng(seed).standard_normal(case.q.shape[1]).astype(np.float32) if has_sinks else None
    return case, {"window": window, "sinks": sinks, "softcap": softcap}


def check_decode(point: Point, lengths: list[int], *, interpret: bool, queries: int = 1) -> None:
    """With several queries a sequence, some sequences have fewer."""
    live = [1 + index % queries for index in range(len(lengths))]
    seed = fresh_seed()
    lengths = [max(length, count) for length, count in zip(lengths, live, strict=True)]
    case, chosen = paged_case(point, lengths, live, seed)
    chosen |= {"with_lse": True} | ({"query_lens": np.array(live, np.int32)} if queries > 1 else {})
    tiles = TILES[point.index % len(TILES)]
    if interpret and tiles is None:
        tiles = DecodeTiles(32, 3)
    call = _bound(paged_decode_attention, case, point, chosen, interpret=interpret, tiles=tiles)
    columns = (case.page_indptr, case.page_ids, case.seq_lens, case.first_position)
    poison_memory()
    out, lse, counters = call(by_sequence(case, case.q, np.nan), case.arena, *columns, case.key_row, case.value_row)
    expected, denominators = dense_softmax(case, **{name: chosen[name] for name in ("window", "sinks", "softcap")})
    assert relative_error(out, by_sequence(case, expected, 0.0)) < BF16_ERROR, f"seed {seed}"
    held = np.arange(max(live))[None, :] < np.array(live)[:, None]
    errors = np.asarray(lse)[held] - by_sequence(case, denominators, 0.0)[held]
    assert np.abs(errors).max() < 0.05, f"seed {seed}"
    assert counters is None or not np.any(counters), f"seed {seed}"


def check_prefill(point: Point, lengths: list[int], queries: list[int], *, interpret: bool) -> None:
    seed = fresh_seed()
    case, chosen = paged_case(point, lengths, queries, seed)
    call = _bound(paged_prefill_attention, case, point, chosen, interpret=interpret)
    columns = (case.page_indptr, case.page_ids, case.query_indptr, case.seq_lens, case.first_position)
    poison_memory()
    out, _ = call(case.q, case.arena, *columns, case.key_row, case.value_row)
    live = case.query_indptr[-1]
    assert relative_error(out[:live], dense_attention(case, **chosen)[:live]) < BF16_ERROR, f"seed {seed}"


def _bound(function: Any, case: PagedCase, point: Point, chosen: dict[str, Any], **extra: Any) -> Any:
    sizes = {"kv_heads": case.kv_heads, "page_entries": case.page_entries, "scale": case.scale}
    return jax.jit(functools.partial(function, **sizes, **chosen, **extra, fp8_scale=point.fp8_scale))


def check_append(point: Point, tokens: int, *, interpret: bool) -> None:
    """Against plain XLA: the same places are written, with the same values but for rounding."""
    seed = fresh_seed()
    rng, kv_heads, entries, width = np.random.default_rng(seed), point.kv_heads, point.page_entries, point.width
    heads, pages = point.ratio * kv_heads, tokens // entries + 3
    x = rng.standard_normal((tokens, heads + 2 * kv_heads, width)).astype(ml_dtypes.bfloat16)
    angles = rng.uniform(-3, 3, (tokens, width // 2))
    turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    places = rng.permutation(np.arange(entries, pages * entries))[:tokens].astype(np.int32)
    elements = 2 * 2 * kv_heads * entries * width
    arena = np.full((pages, elements), np.nan, ml_dtypes.bfloat16)
    if point.fp8_scale is not None:
        arena = np.full((pages, elements // 2), 0xFFFF, np.uint16)  # two NaNs an element
    norms = {name: rng.standard_normal(width).astype(ml_dtypes.bfloat16) for name in ("q_norm", "k_norm")}
    call = {"kv_heads": kv_heads, "page_entries": entries, "fp8_scale": point.fp8_scale, "with_keys": True}
    call |= norms if point.index % 2 else {}
    rows = 2 * kv_heads * entries, 3 * kv_heads * entries
    columns = (x, *turn, arena, places // entries, places % entries, *rows)
    kernel = functools.partial(rope_append, interpret=interpret)
    poison_memory()
    results = [jax.jit(functools.partial(function, **call))(*columns) for function in (kernel, rope_append_ref)]
    (query, held, keys), (expected_query, expected, expected_keys) = (map(np.asarray, result) for result in results)
    assert relative_error(query, expected_query.astype(np.float64)) < BF16_ERROR, f"seed {seed}"
    assert relative_error(keys, expected_keys.astype(np.float64)) < BF16_ERROR, f"seed {seed}"
    wide, expected_wide = _values(held), _values(expected)
    written = ~np.isnan(expected_wide)
    np.testing.assert_array_equal(written, ~np.isnan(wide), f"seed {seed}")
    assert np.count_nonzero(written) == 2 * tokens * kv_heads * width
    # An 8-bit value that falls near the middle of two may be rounded to either: a sixteenth.
    bound = BF16_ERROR if point.fp8_scale is None else 2 * BF16_ERROR
    assert relative_error(wide[written], expected_wide[written]) < bound, f"seed {seed}"


def check_project_heads(point: Point, rows: int, *, interpret: bool, tiles: DenseTiles | None = None) -> None:
    """Against plain XLA: the same queries, and the same places of the arena written, but for rounding."""
    seed, inner = fresh_seed(), 256
    rng, kv_heads, entries, width = np.random.default_rng(seed), point.kv_heads, point.page_entries, point.width
    heads, pages = point.ratio * kv_heads, rows // entries + 3
    x, weight, norm = (
        rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((rows, inner), (inner, (heads + 2 * kv_heads) * width), inner)
    )
    angles = rng.uniform(-3, 3, (rows, width // 2))
    turn = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    places = rng.permutation(np.arange(entries, pages * entries))[:rows].astype(np.int32)
    pages_of = places // entries
    if rows > 2:
        pages_of[-1] = 0  # padding
    elements = 2 * 2 * kv_heads * entries * width
    arena = np.full((pages, elements), np.nan, ml_dtypes.bfloat16)
    if point.fp8_scale is not None:
        arena = np.full((pages, elements // 2), 0xFFFF, np.uint16)  # two NaNs an element
    norms = rng.standard_normal((2, width)).astype(ml_dtypes.bfloat16) if point.index % 2 else ()
    sizes = {"heads": heads, "kv_heads": kv_heads, "page_entries": entries, "fp8_scale": point.fp8_scale}
    arguments = (x, weight, NewTokens(*turn, pages_of, places % entries, *norms), arena)
    arguments += (2 * kv_heads * entries, 3 * kv_heads * entries)
    if point.index % 3:
        sizes["bias"] = rng.standard_normal(weight.shape[1]).astype(ml_dtypes.bfloat16)
    kernel = functools.partial(project_heads, **sizes, norm=norm, tiles=tiles, interpret=interpret)
    poison_memory()
    query, held, counters = jax.jit(kernel)(*arguments)
    expected_query, expected, _ = jax.jit(functools.partial(project_heads_ref, **sizes, norm=norm))(*arguments)
    assert relative_error(query, np.asarray(expected_query, np.float64)) < BF16_ERROR, f"seed {seed}"
    assert counters is None or not np.any(counters), f"seed {seed}"
    wide, expected_wide = (_values(np.asarray(part))[1:] for part in (held, expected))  # page 0 is scratch
    written = ~np.isnan(expected_wide)
    np.testing.assert_array_equal(written, ~np.isnan(wide), f"seed {seed}")
    assert np.count_nonzero(written) == 2 * (rows - (rows > 2)) * kv_heads * width
    # An 8-bit value that falls near the middle of two may be rounded to either: a sixteenth.
    bound = BF16_ERROR if point.fp8_scale is None else 3 * BF16_ERROR
    assert relative_error(wide[written], expected_wide[written]) < bound, f"seed {seed}"


def _values(arena: np.ndarray) -> np.ndarray:
    """float64 of what the arena holds, 8-bit values in byte order."""
    return arena.view(ml_dtypes.float8_e4m3fn if arena.dtype == np.uint16 else arena.dtype).astype(np.float64)
