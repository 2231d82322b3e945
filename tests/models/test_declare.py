from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from resin.models.assemblies import JoinedHeads, Same, whole
from resin.models.axes import Axis
from resin.models.declare import Declaration, Placement, declare
from resin.models.weights import read_share
from resin.plan import InvalidRequest
from resin.runtime.mesh import build_mesh
from resin.runtime.options import RunnerOptions
from resin.topology import MeshShape


def heads(kv_heads: int = 2, queries: int = 4) -> Declaration:
    return declare(
        (5, kv_heads, queries + 2, 3),
        Placement(),
        ("q", "k", "v"),
        assembly=JoinedHeads(kv_heads, queries, 3),
        axes=(None, Axis.KV, None, None),
        inner=5,
    ).declaration


def test_placement_refuses_uneven_heads() -> None:
    with pytest.raises(InvalidRequest, match="num_attention_heads=9"):
        Placement(mesh=MeshShape(tp=2)).split("num_attention_heads", 9, Axis.HEADS)
    with pytest.raises(InvalidRequest, match="num_key_value_heads=3"):
        Placement(mesh=MeshShape(tp=2)).split_kv(3)
    assert [Placement(mesh=MeshShape(tp=tp)).split_kv(2) for tp in (1, 2, 4)] == [2, 1, 1]


@pytest.mark.parametrize(("kv_heads", "queries"), [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_each_device_has_its_queries_and_their_keys(tp: int, kv_heads: int, queries: int) -> None:
    """Where there are more devices than KV heads, those that share one hold copies of its key and value."""
    declaration, mesh = heads(kv_heads, queries), build_mesh(RunnerOptions(tp=tp))
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((count * 3, 5)).astype(np.float32) for count in (8, kv_heads, kv_heads))
    shape = declaration.placed_shape(mesh)
    assert declaration.sharding(mesh).shard_shape(shape)[1] == max(kv_heads // tp, 1)
    held = read_share(declaration, (q, k, v), shape, whole(shape))
    for device, share in enumerate(np.split(held, tp, axis=1)):
        queries_held = share[:, :, :-2].reshape(5, -1).T
        np.testing.assert_array_equal(queries_held, np.split(q, tp)[device])
        first = device * kv_heads // tp * 3
        for place, tensor in ((-2, k), (-1, v)):
            expected = tensor[first : first + share.shape[1] * 3]
            np.testing.assert_array_equal(share[:, :, place].reshape(5, -1).T, expected)


def test_a_window_of_copies_reads_the_head_that_it_is_of() -> None:
    declaration, mesh = heads(2, 4), build_mesh(RunnerOptions(tp=4))
    shape = declaration.placed_shape(mesh)
    assert shape == (5, 4, 4, 3)
    pieces = declaration.pieces(shape, (slice(0, 5), slice(3, 4), slice(0, 4), slice(0, 3)))
    assert [piece.weight[1:3] for piece in pieces] == [
        (slice(1, 2), slice(2, 4)),
        (slice(1, 2), slice(4, 6)),
    ]
    plain = declaration.without_copies(mesh)
    assert plain.placed_shape(mesh) == declaration.shape and plain.spec(mesh) == PartitionSpec(None, None, None, None)


def test_a_weight_in_the_host_s_memory_takes_none_of_the_device_s() -> None:
    mesh = build_mesh(RunnerOptions(tp=2))
    shape = (8, 4)
    held, there = (
        declare(shape, Placement(), "w", axes=(Axis.VOCAB, None), memory=memory).declaration
        for memory in ("device", "host")
    )
    assert (held.device_nbytes(mesh), there.device_nbytes(mesh)) == (8 * 4 * 4 // 2, 0)
    assert there.sharding(mesh).memory_kind == "pinned_host"
    assert isinstance(there.assembly, Same) and there.nbytes == held.nbytes
    array = jax.device_put(np.ones(shape, np.float32), there.sharding(mesh))
    assert array.sharding.memory_kind == "pinned_host"
