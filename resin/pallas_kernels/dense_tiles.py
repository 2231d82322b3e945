"""How products of few rows are cut: tiles, and which of them a shape takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.experimental import pallas as pl

from resin.pallas_kernels.gpu import H200, Gpu
from resin.pallas_kernels.tiles import MIN_ROWS

VECTOR_SUMS = 2  # rows times parts: 64 registers a thread each, and four no longer fit


@dataclass(frozen=True, slots=True)
class DenseTiles:
    """How the work is cut: columns and inner values a tile, shares of K, warps and pipeline depth."""

    block_columns: int = 128
    block_inner: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 5
    vector: bool = False  # on the vector units, at most VECTOR_SUMS rows (gated: half of it)
    transposed: bool = False  # W.T @ x.T: columns are the rows of the tensor cores' product


def choose_dense_tiles(rows: int, inner: int, columns: int, gpu: Gpu, *, gated: bool) -> DenseTiles:
    """One program a multiprocessor where K and N allow it.

    Measured on an H200, us and fraction of copy bandwidth: at 1 row 4096 x (2 x 14336) gated 55.6 (0.99), 14336 x 4096
    30.4 (0.91), at 8 rows 4096 x 4096 11.2 (0.70); at 32 rows 55.1, 31.3 and 12.9, at 128 rows 35.8 and 15.7.

    Products below 8M weights of one row are cut so fine that a program has one to three steps, whose loads are all in
    flight at once: 1024 x (2 x 3072) gated 7.0, 3072 x 1024 5.3, 2048 x 1024 4.5; half as many splits take 1 to 2 us
    more. With 8 rows they take 7.8, 5.3 and 4.6.

    Args:
        rows, inner, columns: M, K and the columns of the result.
        gpu: what it runs on.
        gated: two products a column.
    """
    vector = DenseTiles(64, 128, num_stages=3, vector=True)
    vector = replace(vector, splits=_most_splits(vector, 8, inner, columns, gpu))
    parts = 2 if gated else 1
    fits = rows * parts <= VECTOR_SUMS
    if rows > MIN_ROWS:
        if gated:
            return DenseTiles(splits=_splits(columns, 128, gpu), num_stages=4, transposed=True)
        return DenseTiles(64, 128, splits=_splits(columns, 64, gpu), num_stages=4, transposed=True)
    if inner * columns * parts < 2**23:
        few = DenseTiles(64, 32, num_warps=2) if gated else DenseTiles(32, 256, num_stages=3)
        return vector if fits else replace(few, splits=_most_splits(few, 4, inner, columns, gpu))
    if not gated and 0.75 * gpu.cores <= -(-columns // 32) <= gpu.cores and inner * columns <= 2**25:
        return DenseTiles(32, 512, num_warps=2, num_stages=3)
    blocks, splits = -(-columns // 128), _splits(columns, 128, gpu)
    if blocks >= 2 * gpu.cores or 0.75 * gpu.cores <= blocks * splits <= gpu.cores:
        return DenseTiles(splits=splits)
    return vector if fits else DenseTiles(splits=8 if 8 * blocks <= 4 * gpu.cores else 2)


def _most_splits(tiles: DenseTiles, most: int, inner: int, columns: int, gpu: Gpu) -> int:
    """The largest power of two up to `most` that leaves each program a step, and a multiprocessor four programs."""
    most = min(most, -(-inner // tiles.block_inner), 4 * gpu.cores // -(-columns // tiles.block_columns))
    return 1 << max(0, most.bit_length() - 1)


def _splits(columns: int, block: int, gpu: Gpu) -> int:
    """The fewest parts of K, a power of two up to 8, that give most multiprocessors a program."""
    return next((splits for splits in (1, 2, 4) if splits * -(-columns // block) >= 0.75 * gpu.cores), 8)


# Rows up to which each tiling is the best of fifty on an H200, programs that K is split for (48 heads of 128, hidden
# 4096). With the kernels around them, us: at 1 row 23.7 against 25.1 for the product and `rope_append` in two
# kernels, at 8 rows 24.2 against 23.5 in three, at 32 rows 25.4 against 25.5 in three, at 64 rows 29.8 against 27.6
# in three.
HEAD_TILES = (
    (1, 528, DenseTiles(64, 64, num_warps=2, num_stages=4, vector=True)),
    (16, 240, DenseTiles(64, 32, num_stages=4)),
    (32, 192, DenseTiles(64, 64, num_stages=4, transposed=True)),
    (64, 240, DenseTiles(64, 64, num_warps=8, num_stages=3, transposed=True)),
)


def choose_head_tiles(rows: int, inner: int, joined: int, width: int, gpu: Gpu) -> DenseTiles:
    """One head a program, K split until the programs fill the GPU.

    Args:
        rows, inner: M and K.
        joined: query, key and value heads.
        width: of a head.
        gpu: what it runs on.
    """
    _, programs, tiles = next((row for row in HEAD_TILES if rows <= row[0]), HEAD_TILES[-1])
    columns = pl.next_power_of_2(width // 2)
    if tiles.vector:
        tiles = replace(tiles, block_inner=tiles.block_inner * 64 // columns)  # its sums are in registers
    steps = -(-inner // tiles.block_inner)
    most = steps if tiles.vector else steps // tiles.num_stages
    return replace(tiles, block_columns=columns, splits=max(1, min(programs * gpu.cores // H200.cores // joined, most)))


def choose_route_tiles(rows: int, inner: int, experts: int) -> DenseTiles:
    """All experts in one block, K split over 32 programs, or fewer where more rows make the parts large.

    Args:
        rows, inner, experts: M, K and E.
    """
    columns = max(16, pl.next_power_of_2(experts))
    vector = rows <= VECTOR_SUMS
    block_inner = max(16, min(64, 8192 // columns))  # the vector path's sums are in registers
    splits = min(
        32 if vector else 16 if rows <= MIN_ROWS or columns <= 32 else 8, pl.next_power_of_2(-(-inner // block_inner))
    )
    # The last program holds all scores: at most 32 registers of each of its threads.
    tile_rows = pl.next_power_of_2(rows) if vector else max(MIN_ROWS, pl.next_power_of_2(rows))
    num_warps = max(4, tile_rows * columns // 1024)
    return DenseTiles(columns, block_inner, splits, num_warps, num_stages=3, vector=vector)
