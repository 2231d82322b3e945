"""What a plan's cache keeps in the arena: states in place, rows that several layers share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.cache.paged import PagedCache
from resin.models.cache.protocol import Attend, PlaneRef
from resin.models.tokens import Tokens
from resin.pallas_kernels.table import Backend, pick_kernels
from resin.plan import CacheGroup, HistoryGroup, InvalidRequest, Phase, Plane, RowFlag, StateGroup, plan_geometry

ROWS, WIDTH, HEADS, PAGES = 3, 32, 2, 4096
GROUPS: tuple[CacheGroup, ...] = (
    HistoryGroup("history", (Plane("kv", 4, WIDTH),)),
    StateGroup("state", (Plane("sum", 6, WIDTH),)),
)
GEOMETRY = plan_geometry(GROUPS, arena_dtype="float32", page_tokens=16)
ELEMENTS = GEOMETRY.page_bytes // 4
STATE = PlaneRef.of_layer("state", "sum", 1, 2, WIDTH)
ENTRIES = PlaneRef.of_layer("history", "kv", 1, 2, WIDTH)


def build_cache(arena: jax.Array, groups: tuple[CacheGroup, ...] = GROUPS) -> PagedCache:
    """One new token for each of three sequences: the second starts here, the third goes on in another page."""
    columns = {
        "seq_lens": [5, 1, 9],
        "query_indptr": range(ROWS + 1),
        "row_flags": [0, int(RowFlag.FRESH_STATE), 0],
        "page_indptr:history": range(ROWS + 1),
        "page_ids:history": [1, 2, 3],
        "first_position:history": [0] * ROWS,
        "append_pages:history": [1, 2, 3],
        "append_offsets:history": [4, 0, 8],
        "input_pages:state": [4, 5, 6],
        "output_pages:state": [4, 5, 7],
    }
    zeros, places = jnp.zeros(ROWS, jnp.int32), jnp.arange(ROWS, dtype=jnp.int32)
    return PagedCache(
        phase=Phase.DECODE,
        columns={name: jnp.array(list(column), jnp.int32) for name, column in columns.items()},
        tokens=Tokens(zeros, zeros, places, jnp.ones(ROWS, jnp.bool_)),
        arena=arena,
        groups=groups,
        geometry=plan_geometry(groups, arena_dtype="float32", page_tokens=16),
        kernels=pick_kernels("cpu", backend=Backend.REFERENCE),
    )


def filled_arena() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((PAGES, ELEMENTS)).astype(np.float32)


def test_states_are_read_and_written_where_their_pages_are() -> None:
    arena = filled_arena()
    cache = build_cache(jnp.asarray(arena))
    held = np.asarray(cache.read_state(STATE, jnp.float32))
    state = slice(2 * WIDTH, 4 * WIDTH)  # after the rows of the layer before
    expected = arena[[4, 5, 6], state].reshape(ROWS, 2, WIDTH)
    np.testing.assert_array_equal(held[[0, 2]], expected[[0, 2]])
    assert not held[1].any()
    cache.write_state(STATE, jnp.asarray(held + 1))
    arena[[4, 5, 7], state] = (held + 1).reshape(ROWS, -1)
    np.testing.assert_array_equal(cache.arena, arena)


def move_on(cache: PagedCache) -> None:
    for _ in range(3):
        cache.write_state(STATE, cache.read_state(STATE, jnp.float32) * 2)


def filter_inputs(cache: PagedCache) -> None:
    cache.shift_state(STATE, jnp.ones((ROWS, WIDTH)))


@pytest.mark.parametrize("use", [move_on, filter_inputs])
def test_states_change_in_place(use: Callable[[PagedCache], None]) -> None:
    def step(arena: jax.Array) -> jax.Array:
        cache = build_cache(arena)
        use(cache)
        return cache.arena

    arena = jax.ShapeDtypeStruct((PAGES, ELEMENTS), jnp.float32)
    memory = jax.jit(step, donate_argnums=0).lower(arena).compile().memory_analysis()
    assert memory.alias_size_in_bytes == PAGES * ELEMENTS * 4
    assert memory.temp_size_in_bytes < PAGES * ELEMENTS * 4 / 16


def test_layers_that_name_the_same_rows_share_them() -> None:
    rng = np.random.default_rng(1)
    cache = build_cache(jnp.asarray(filled_arena()))
    cache.append(ENTRIES, jnp.asarray(rng.standard_normal((ROWS, 2, WIDTH)), jnp.float32))
    query = jnp.asarray(rng.standard_normal((ROWS, HEADS, WIDTH)), jnp.float32)
    again = PlaneRef("history", "kv", 2, 2, WIDTH)
    first, second = (cache.attend(query, *ref.halves(), Attend(0.2), with_lse=True) for ref in (ENTRIES, again))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    other_layer = PlaneRef.of_layer("history", "kv", 0, 2, WIDTH)
    assert np.abs(cache.attend(query, *other_layer.halves(), Attend(0.2)).out - first.out).max() > 0.1


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (PlaneRef("other", "kv", 0, 2, WIDTH), "group='other'"),
        (PlaneRef("history", "other", 0, 2, WIDTH), "plane='other'"),
        (PlaneRef("history", "kv", 3, 2, WIDTH), "at least 5 rows of 32"),
        (PlaneRef("state", "sum", 0, 2, WIDTH), "a History or Window group"),
    ],
)
def test_rows_that_the_model_has_not_declared_are_refused(ref: PlaneRef, expected: str) -> None:
    cache = build_cache(jnp.zeros((8, ELEMENTS)))
    with pytest.raises(InvalidRequest, match=expected):
        cache.append(ref, jnp.zeros((ROWS, 2, WIDTH)))


def test_only_states_are_read_as_states() -> None:
    with pytest.raises(InvalidRequest, match="a State group"):
        build_cache(jnp.zeros((8, ELEMENTS))).read_state(ENTRIES, jnp.float32)
