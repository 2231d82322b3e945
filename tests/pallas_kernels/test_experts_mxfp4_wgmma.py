"""What Hopper's MXFP4 product is handed: pairs in tiles of one expert, columns as the words have them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from resin.pallas_kernels.experts_mxfp4_wgmma import (
    FEW,
    MANY,
    SOME,
    WgmmaTiles,
    choose_wgmma_tiles,
    wgmma_product,
)
from resin.pallas_kernels.gates import Gate
from resin.pallas_kernels.gpu import H200
from resin.pallas_kernels.mxfp4 import PackedMatrices, pack_words, packed_shapes
from resin.pallas_kernels.mxfp4_registers import deal_columns
from resin.pallas_kernels.pair_tiles import tile_pairs
from tests.pallas_kernels.cuda_lowering import mosaic_kernels


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(1, 1, 8), (7, 3, 8), (40, 4, 16), (300, 5, 32), (64, 128, 8)])
@pytest.mark.parametrize("share_without", [0.0, 0.3, 1.0])
def test_every_pair_has_a_row_in_a_tile_of_its_expert(pairs, experts, tile, share_without) -> None:
    rng = np.random.default_rng((pairs, experts, tile))
    ids = rng.integers(0, experts, pairs).astype(np.int32)
    ids[rng.random(pairs) < share_without] = -1
    tiles = tile_pairs(jnp.asarray(ids), experts, tile)
    source, place, expert, live = (np.asarray(each) for each in tiles)
    assert len(source) == len(expert) * tile
    counts = np.bincount(ids[ids >= 0], minlength=experts)
    assert live.item() == sum(-(-counts // tile)) <= len(expert)
    taken = place[ids >= 0]
    assert len(set(taken.tolist())) == len(taken)
    np.testing.assert_array_equal(source[taken], np.flatnonzero(ids >= 0))
    np.testing.assert_array_equal(expert[taken // tile], ids[ids >= 0])
    assert (taken < live * tile).all()
    assert (place[ids < 0] == len(source)).all()
    assert ((source >= 0) & (source < pairs)).all()


def test_columns_are_dealt_as_a_lane_reads_its_codes() -> None:
    """Code (g, j, s) of a tile holds the columns that stand at its place in the dealt row."""
    inner, row = 160, 5
    blocks = np.zeros((16, inner // 32, 16), np.uint8)
    dealt = np.asarray(deal_columns(jnp.arange(inner, dtype=jnp.float32)[None] + 1))[0]
    assert dealt.shape == (192,)
    assert sorted(dealt) == [0.0] * 32 + [float(each + 1) for each in range(inner)]
    for column in range(inner):
        blocks[:] = 0
        byte, nibble = divmod(column % 32, 2)
        blocks[row, column // 32, byte] = 1 << (4 * nibble)
        words = np.asarray(pack_words(blocks))[0]
        ((group, word),) = np.argwhere(words)
        j, product = word // 4 % 4, word % 4
        assert word // 16 == row % 8
        half = column % 64 // 32
        assert dealt[group * 64 + product * 16 + half * 8 + j * 2 + nibble] == column + 1


def test_tiles_follow_the_pairs_of_an_expert() -> None:
    assert [choose_wgmma_tiles(32 * each, 32) for each in (5, 16, 17, 32, 33, 4096)] == [
        FEW,
        FEW,
        SOME,
        SOME,
        MANY,
        MANY,
    ]


@pytest.mark.parametrize("tiles", [FEW, SOME, MANY], ids=["few", "some", "many"])
@pytest.mark.parametrize("gate", [None, Gate(alpha=1.702, limit=7.0, up_bias=1.0)], ids=["down", "gated"])
@pytest.mark.parametrize(("rows", "inner"), [(2880, 2880), (336, 160)], ids=str)
def test_it_lowers_for_hopper(tiles: WgmmaTiles, gate: Gate | None, rows: int, inner: int) -> None:
    """Within the shared memory of a block, which lowering checks."""
    import jax

    experts, pairs = 4, 300
    shapes = packed_shapes(experts, rows, inner)
    kinds = jnp.int32, jnp.int32, jnp.float32
    matrices = PackedMatrices(*(jax.ShapeDtypeStruct(*each) for each in zip(shapes, kinds, strict=True)))

    def call(x, ids, matrices, bias):
        lists = tile_pairs(ids, experts, tiles.pairs)
        return wgmma_product(deal_columns(x)[lists.source], matrices, lists, gate=gate, bias=bias, tiles=tiles)

    arrays = (
        jax.ShapeDtypeStruct((pairs, inner), jnp.bfloat16),
        jax.ShapeDtypeStruct((pairs,), jnp.int32),
        matrices,
        jax.ShapeDtypeStruct((experts, rows), jnp.bfloat16),
    )
    assert mosaic_kernels(call, *arrays, arch=H200.arch) == 1
