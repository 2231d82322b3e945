"""What the arena is filled with before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bench.resident import fill_with_noise
from resin import HistoryGroup, Plane, RunnerConfig, plan_geometry


class Arena:
    """The part of a runner that `fill_with_noise` uses."""

    def __init__(self, dtype: str, kv_dtype: str | None) -> None:
        groups = (HistoryGroup("history", (Plane("kv", 4, 64, kv_dtype),)),)
        self.config = RunnerConfig(groups=groups, geometry=plan_geometry(groups, arena_dtype=dtype))
        self.arena = jnp.zeros((37, 512), dtype)

    def replace_arena(self, change: Callable[[jax.Array], jax.Array]) -> None:
        self.arena = change(self.arena)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16"])
def test_bytes_are_numbers_of_every_width_that_is_read(dtype: str) -> None:
    runner: Any = Arena(dtype, "float8_e4m3fn")
    fill_with_noise(runner)
    held = np.asarray(runner.arena)
    narrow = held.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.abs(narrow).max() < 2 and narrow.std() > 0.1
    wide = (held.view(ml_dtypes.bfloat16) if dtype == "uint16" else held).astype(np.float64)
    assert np.isfinite(wide).all() and np.abs(wide).max() < 4
    assert len(np.unique(held)) > 1000


def test_values_of_the_arena_are_unit_normal() -> None:
    runner: Any = Arena("float32", None)
    fill_with_noise(runner)
    held = np.asarray(runner.arena)
    assert abs(held.mean()) < 0.05 and 0.95 < held.std() < 1.05
