"""Time that the GPU itself spends in named kernels, from the profiler: no launch gaps, no host."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FLUSH_BYTES = 256 << 20  # several times the last-level cache of any GPU so far


class DeviceTimer:
    """Runs calls under the profiler, each after reading enough other memory to empty the caches."""

    def __init__(self) -> None:
        self._flush_data = jax.random.normal(jax.random.key(0), (FLUSH_BYTES // 4,), jnp.float32)
        self._flush = jax.jit(lambda x: x.sum())

    def median_s(self, launch: Callable[[], Any], kernels: Sequence[str], repeats: int = 7) -> float:
        """Median over the repeats of the seconds that one launch spends in the named kernels.

        Args:
            launch: starts the work and returns its arrays.
            kernels: parts of the device's kernel names; a launch runs each at least once.
            repeats: launches under the profiler, after one outside it.

        Raises:
            RuntimeError: the profiler saw no such kernel (wrong name, or a platform without kernel events).
        """
        jax.block_until_ready((self._flush(self._flush_data), launch()))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(repeats):
                    jax.block_until_ready(self._flush(self._flush_data))
                    jax.block_until_ready(launch())
            (trace,) = Path(folder).rglob("*.xplane.pb")
            events = kernel_events(trace, kernels)
        if not events or len(events) % repeats:
            raise RuntimeError(f"{len(events)} events of {list(kernels)} in {repeats} launches")
        durations = np.array([duration for _, duration in events]).reshape(repeats, -1).sum(axis=1)
        return float(np.median(durations)) / 1e9


def kernel_events(trace: Path, kernels: Sequence[str]) -> list[tuple[float, float]]:
    """(start, duration) in ns of every event on a GPU stream whose name contains one of `kernels`, in order."""
    profile = jax.profiler.ProfileData.from_file(str(trace))
    lines = (line for plane in profile.planes if "GPU" in plane.name for line in plane.lines)
    return sorted(
        (event.start_ns, event.duration_ns)
        for line in lines
        if line.name.startswith("Stream")
        for event in line.events
        if any(kernel in event.name for kernel in kernels)
    )
