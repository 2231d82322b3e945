"""Random paged batches and a dense float64 attention to hold the paged kernels against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class PagedCase:
    """Inputs of one paged attention call; every arena entry that no sequence owns is NaN."""

    q: Array  # float32 [T, H, D]
    arena: Array  # float32 [num_pages, page_elements]
    page_indptr: Array
    page_ids: Array
    query_indptr: Array
    seq_lens: Array
    first_position: Array
    key_row: int
    value_row: int
    keys: tuple[Array, ...]  # per sequence [positions from first_position, K, D]
    values: tuple[Array, ...]
    page_entries: int
    kv_heads: int
    scale: float


def build_case(
    lengths: list[int],
    query_lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    width: int,
    page_entries: int,
    layers: int = 2,
    window: int | None = None,
    padding_tokens: int = 0,
    seed: int = 0,
    dtype: type = np.float32,
) -> PagedCase:
    """Sequences of `lengths` tokens whose last `query_lengths` are queries, in shuffled pages of a poisoned arena."""
    rng = np.random.default_rng(seed)
    layer = layers - 1
    firsts = []
    for length, queries in zip(lengths, query_lengths, strict=True):
        oldest = max(0, length - queries - window + 1) if window is not None else 0
        firsts.append(oldest // page_entries * page_entries)
    counts = [-(-(length - first) // page_entries) for length, first in zip(lengths, firsts, strict=True)]
    num_pages = sum(counts) + 3
    page_rows = layers * 2 * kv_heads * page_entries
    rows = np.full((num_pages, layers * 2, kv_heads, page_entries, width), np.nan, dtype)
    page_indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    page_ids = np.zeros(page_indptr[-1] + 2, np.int32)
    page_ids[: page_indptr[-1]] = rng.permutation(np.arange(1, num_pages))[: page_indptr[-1]]
    keys, values = [], []
    for b, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
        both = rng.standard_normal((2, length - first, kv_heads, width)).astype(dtype)
        for j in range(length - first):
            page = page_ids[page_indptr[b] + j // page_entries]
            rows[page, layer * 2 : layer * 2 + 2, :, j % page_entries] = both[:, j]
        keys.append(both[0].astype(np.float64))
        values.append(both[1].astype(np.float64))
    query_indptr = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    q = rng.standard_normal((query_indptr[-1] + padding_tokens, heads, width)).astype(dtype)
    return PagedCase(
        q=q,
        arena=rows.reshape(num_pages, page_rows * width),
        page_indptr=page_indptr,
        page_ids=page_ids,
        query_indptr=query_indptr,
        seq_lens=np.array(lengths, np.int32),
        first_position=np.array(firsts, np.int32),
        key_row=layer * 2 * kv_heads * page_entries,
        value_row=(layer * 2 + 1) * kv_heads * page_entries,
        keys=tuple(keys),
        values=tuple(values),
        page_entries=page_entries,
        kv_heads=kv_heads,
        scale=width**-0.5,
    )


def dense_attention(case: PagedCase, **options) -> Array:
    """float64 attention of every live query token, `[T, H, D]` with zeros on padding; options of `dense_softmax`."""
    return dense_softmax(case, **options)[0]


def dense_softmax(
    case: PagedCase, *, window: int | None = None, sinks: Array | None = None, softcap: float | None = None
) -> tuple[Array, Array]:
    """`dense_attention` and the logarithms of its denominators, `[T, H]` with -inf on padding."""
    out, lse = np.zeros(case.q.shape, np.float64), np.full(case.q.shape[:2], -np.inf)
    group = case.q.shape[1] // case.kv_heads
    for b in range(len(case.seq_lens)):
        begin, end = case.query_indptr[b], case.query_indptr[b + 1]
        for t in range(begin, end):
            position = case.seq_lens[b] - (end - t)
            low = max(0, position - window + 1) if window is not None else 0
            span = slice(low - case.first_position[b], position + 1 - case.first_position[b])
            keys = np.repeat(case.keys[b][span], group, axis=1)
            values = np.repeat(case.values[b][span], group, axis=1)
            scores = np.einsum("hd,nhd->hn", case.q[t].astype(np.float64), keys) * case.scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            top = scores.max(1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks.astype(np.float64)[:, None] - top)
            out[t] = np.einsum("hn,nhd->hd", weights / total, values)
            lse[t] = (top + np.log(total))[:, 0]
    return out, lse


def merge(parts: list[tuple[Array, Array]], sinks: Array | None = None) -> tuple[Array, Array]:
    """float64 attention to the union of disjoint key sets from results and logarithms of denominators of each."""
    outs, lses = (np.stack([np.asarray(part[i], np.float64) for part in parts]) for i in (0, 1))
    terms = lses if sinks is None else np.concatenate([lses, np.broadcast_to(sinks, (1, *lses.shape[1:]))])
    total = np.logaddexp.reduce(terms, axis=0)
    return np.sum(outs * np.exp(lses - total)[..., None], axis=0), total


def by_sequence(case: PagedCase, vectors: Array, fill: float) -> Array:
    """Live tokens' vectors `[T, ...]` as `[B, Q, ...]`, as many a sequence as the longest has; the rest is `fill`."""
    lengths = np.diff(case.query_indptr)
    out = np.full((len(lengths), lengths.max(), *vectors.shape[1:]), fill, vectors.dtype)
    for b, length in enumerate(lengths):
        out[b, :length] = vectors[case.query_indptr[b] : case.query_indptr[b + 1]]
    return out


def fp8_case(case: PagedCase, scale: float, bytes_per_element: int = 2) -> PagedCase:
    """The case with keys and values rounded to 8 bits, and an arena of unsigned integers that holds their bytes."""
    count, width = bytes_per_element, case.q.shape[2]
    scaled = np.clip(case.arena.astype(np.float32) / scale, -448, 448)
    vectors = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(-1, count, width // count)
    # Byte p of element j is value p * width / count + j: the pieces of a vector, one byte each, side by side.
    arena = np.ascontiguousarray(vectors.transpose(0, 2, 1)).view(f"<u{count}")
    rounded = {
        name: tuple(
            np.clip(part / scale, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            * scale
            for part in getattr(case, name)
        )
        for name in ("keys", "values")
    }
    return replace(case, arena=arena.reshape(len(case.arena), -1), **rounded)


def relative_error(out: Array, reference: Array) -> float:
    """`|out - reference| / |reference|` over all elements; NaN stays NaN."""
    return float(np.linalg.norm(np.asarray(out, np.float64) - reference) / np.linalg.norm(reference))
