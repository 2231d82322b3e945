"""Times plans that stay as they are: the device's own speed, without a scheduler.

A plan is launched K times in a row, each launch taking the arena and the slots that the one before it gave back, and
only the last is waited for; what a lone launch takes is subtracted, so that the device's own pace is left. Cases and
the device's ceilings take turns, several times over, so that all of them see the same clocks and neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.roofline import CeilingProbe, burst_s, launches_within
from resin import BatchPlan
from resin.plan.cache import fp8_scales
from resin.runtime import ModelRunner

# Launches that a device queues before a call blocks: JAX holds 32, and a call that waits says nothing about the host.
QUEUED_LAUNCHES = 8
TRACED_LAUNCHES = 3
NOISE_BYTES = 256 << 20  # more than any last-level cache, so that repeats of it are not cached


@dataclass
class ResidentCase:
    """A plan on the device and what was measured of it.

    Attributes:
        plan: launched as it is, over and over.
        launches: K, in one burst.
        step_ms: milliseconds a launch, one value a round.
        call_ms: milliseconds that the host spends in a call, one value a round.
    """

    plan: BatchPlan
    launches: int = 0
    step_ms: list[float] = field(default_factory=list)
    call_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return float(np.median(self.step_ms))


def fill_with_noise(runner: ModelRunner, seed: int = 0) -> None:
    """Writes unit normal values all over the arena, or bytes that are 8-bit values below 2 where a group holds such.

    Zeros would be faster than what a cache really holds.
    """
    as_bytes = bool(fp8_scales(runner.config.groups)) or runner.config.arena_dtype == "uint16"
    runner.replace_arena(partial(_noise, key=jax.random.key(seed), as_bytes=as_bytes))


@partial(jax.jit, donate_argnums=0, static_argnames="as_bytes")
def _noise(arena: jax.Array, key: jax.Array, as_bytes: bool) -> jax.Array:
    pages, width = arena.shape
    rows = max(1, min(pages, NOISE_BYTES // (width * arena.dtype.itemsize)))
    if as_bytes:
        # The upper exponent bit of every byte off: no NaN and no large value, as 8-bit and as wider floats.
        bits = jax.random.bits(key, (rows, width * arena.dtype.itemsize), jnp.uint8) & 0xBF
        block = lax.bitcast_convert_type(bits.reshape(rows, width, arena.dtype.itemsize), arena.dtype)
    else:
        block = jax.random.normal(key, (rows, width), arena.dtype)

    def write(index: jax.Array, arena: jax.Array) -> jax.Array:
        # The last block slides back so that it ends with the arena.
        return lax.dynamic_update_slice(arena, block, (index * rows, jnp.int32(0)))

    return lax.fori_loop(0, -(-pages // rows), write, arena)


def time_rounds(
    runner: ModelRunner, cases: list[ResidentCase], probe: CeilingProbe, *, rounds: int, burst_target_s: float
) -> None:
    """Fills the cases' measurements.

    Args:
        runner: warm, its arena full of noise.
        cases: take turns in this order.
        probe: measured in every round as well.
        rounds: repeats, at least 5 for figures that are kept.
        burst_target_s: length of one burst.
    """
    for case in cases:
        launch = partial(runner.launch, case.plan)
        jax.block_until_ready(launch())
        case.launches = launches_within(launch, burst_target_s)
    for _ in range(rounds):
        probe.measure()
        for case in cases:
            launch = partial(runner.launch, case.plan)
            case.step_ms.append(burst_s(launch, case.launches) * 1000)
            case.call_ms.append(host_call_s(launch) * 1000)


def host_call_s(launch: Callable[[], Any]) -> float:
    """Median seconds that a call keeps the host, while the device has room in its queue."""
    seconds = []
    for _ in range(QUEUED_LAUNCHES):
        started = time.perf_counter()
        output = launch()
        seconds.append(time.perf_counter() - started)
    jax.block_until_ready(output)
    return float(np.median(seconds))


def trace(runner: ModelRunner, plan: BatchPlan, directory: Path) -> None:
    """Writes a Perfetto trace of a few launches; it opens in ui.perfetto.dev. Tracing slows what it shows."""
    with jax.profiler.trace(str(directory), create_perfetto_trace=True):
        for _ in range(TRACED_LAUNCHES):
            output = runner.launch(plan)
        jax.block_until_ready(output)
