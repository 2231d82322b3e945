"""What tiles are chosen for: the multiprocessors of a GPU and what one of them has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Bytes of shared memory that one block may have, by compute capability.
SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as kernels see it.

    Attributes:
        cores: multiprocessors.
        shared_bytes: of shared memory that a block may have.
        arch: compute capability times ten: 90 for 9.0.
    """

    cores: int
    shared_bytes: int
    arch: int

    @classmethod
    def of(cls, device: Any) -> Gpu:
        """The GPU behind a JAX device; an H200 where the device does not tell."""
        cores, capability = (getattr(device, name, None) for name in ("core_count", "compute_capability"))
        if not cores or not capability:
            return H200
        arch = int(str(capability).replace(".", ""))
        return cls(int(cores), SHARED_BYTES.get(arch, min(SHARED_BYTES.values())), arch)


H200 = Gpu(cores=132, shared_bytes=SHARED_BYTES[90], arch=90)  # all tiles were measured on it
