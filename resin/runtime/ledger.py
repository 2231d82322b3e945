"""The memory ledger: what a configuration needs on one device, proved before it is allocated."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import jax

from resin.plan import InvalidRequest


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes on one device.

    Attributes:
        weights: all weights.
        arena: the cache pool.
        slots: the slot table.
        largest_temporary: the most that any program needs beside its arguments.
        limit: what the device has for this process.
    """

    weights: int
    arena: int
    slots: int
    largest_temporary: int
    limit: int

    @property
    def total(self) -> int:
        return self.weights + self.arena + self.slots + self.largest_temporary

    def check(self) -> None:
        """Raises InvalidRequest with the numbers if the sum exceeds the limit."""
        if self.total - self.arena > self.limit:
            raise InvalidRequest(
                "model", f"{self.weights / 1e6:,.1f} MB", f"one that fits the device's memory ({self})"
            )
        if self.total > self.limit:
            raise InvalidRequest("cache_bytes", self.arena, f"a sum within the device's memory ({self})")

    def __str__(self) -> str:
        parts = ("weights", "arena", "slots", "largest_temporary", "total", "limit")
        return ", ".join(f"{part.replace('_', ' ')} {getattr(self, part) / 1e6:,.1f} MB" for part in parts)


def device_limit_bytes(device: jax.Device) -> int:
    """Memory that this process can still use on the device, beyond what it holds already."""
    if device.platform == "cpu":
        return _available_host_bytes()
    stats = device.memory_stats() or {}
    limit = int(stats.get("bytes_limit", 0))
    return limit - int(stats.get("bytes_in_use", 0)) if limit else _free_cuda_bytes(device)


def _free_cuda_bytes(device: jax.Device) -> int:
    """What the CUDA driver has left: some of JAX's allocators have no limit of their own."""
    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    ordinal = device.local_hardware_id or 0
    failed = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) or driver.cuCtxPushCurrent_v2(context)
    failed = failed or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(ordinal)
    if failed:
        raise InvalidRequest("cache_bytes", None, f"a number: the CUDA driver does not say what is free ({failed})")
    return free.value


def _available_host_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise InvalidRequest("cache_bytes", None, "a number: /proc/meminfo does not say what is available")


def program_temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of a program's temporaries and of outputs that do not reuse an argument."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    return int(analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
