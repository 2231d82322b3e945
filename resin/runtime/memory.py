"""Sizes of what a runner keeps on its devices, held against what these have."""

from __future__ import annotations

import jax

from resin.plan import ArenaSpec, InvalidRequest
from resin.runtime.executable import REPLICATED, StepSpec
from resin.runtime.ledger import MemoryLedger, device_limit_bytes
from resin.runtime.masks import mask_bytes
from resin.runtime.mesh import local_device
from resin.runtime.programs import Programs
from resin.runtime.slots import abstract_slots

# Share of a GPU's free memory that the arena takes when nothing is said; the rest is for temporaries.
GPU_CACHE_SHARE = 0.9
CPU_CACHE_BYTES = 1 << 30
MAX_ARENA_ROWS = 1 << 31  # of the narrowest plane


class Memory:
    """Accounts of a runner's memory.

    Args:
        cache_bytes: size of the arena; None takes a share of free memory.

    Attributes:
        has_weights: whether they are on the device by now.
    """

    def __init__(self, spec: StepSpec, programs: Programs, cache_bytes: int | None) -> None:
        self.has_weights = False
        self._spec = spec
        self._programs = programs
        self._cache_bytes = cache_bytes
        self._device = local_device(spec.mesh)

    def account(self, arena_bytes: int) -> MemoryLedger:
        """The ledger of an arena of this size and the programs that exist."""
        spec = self._spec
        slots = abstract_slots(spec.config, jax.sharding.NamedSharding(spec.mesh, REPLICATED), spec.drafter)
        weights = spec.model.device_nbytes(spec.mesh)
        return MemoryLedger(
            weights=weights,
            arena=arena_bytes,
            slots=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slots)) + mask_bytes(spec.config),
            largest_temporary=self._programs.largest_temporary_bytes,
            limit=device_limit_bytes(self._device) + (weights if self.has_weights else 0),
        )

    def free_pages(self) -> int:
        """Pages that fit: what the options say, else a share of the memory that weights and slots leave.

        Raises:
            InvalidRequest: they leave none.
        """
        page_bytes = self._spec.config.geometry.page_bytes
        if page_bytes == 0:
            return 0
        if self._cache_bytes is not None:
            return self._cache_bytes // page_bytes
        least = self.account(2 * page_bytes)
        least.check()
        free = least.limit - least.weights - least.slots
        share = min(CPU_CACHE_BYTES, free // 2) if self._device.platform == "cpu" else int(free * GPU_CACHE_SHARE)
        return min(share // page_bytes, self._most_pages)

    def check_arena(self, arena: ArenaSpec) -> None:
        """Refuses an arena that the runner's programs or its device cannot have, even without temporaries.

        Raises:
            InvalidRequest: with what it should be.
        """
        config = self._spec.config
        expected = (config.geometry.page_bytes, config.arena_dtype)
        if (arena.page_bytes, arena.dtype) != expected:
            raise InvalidRequest("arena", arena, f"page_bytes and dtype {expected}")
        if arena.num_pages < 2:
            raise InvalidRequest("num_pages", arena.num_pages, "at least 2: page 0 is scratch")
        if config.groups and arena.num_pages > self._most_pages:
            raise InvalidRequest("num_pages", arena.num_pages, f"fewer than 2^31 rows of {self._row_bytes} bytes")
        self.account(arena.total_bytes).check()

    @property
    def _most_pages(self) -> int:
        """Pages that 32-bit row indices reach."""
        return (MAX_ARENA_ROWS - 1) // (self._spec.config.geometry.page_bytes // self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        """Of the narrowest plane."""
        config = self._spec.config
        return min(plane.vector_bytes(config.arena_dtype) for group in config.groups for plane in group.planes)
