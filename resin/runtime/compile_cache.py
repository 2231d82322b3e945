"""The persistent cache of compiled programs, shared between processes and bounded in size."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax

_HIT = "/jax/compilation_cache/cache_hits"
_hits = threading.local()


def cache_hits() -> int:
    """Programs that the cache has given to this thread."""
    return getattr(_hits, "count", 0)


def _note(event: str, **details: Any) -> None:
    if event == _HIT:
        _hits.count = cache_hits() + 1


jax.monitoring.register_event_listener(_note)


def use_compile_cache(directory: Path, max_bytes: int) -> None:
    """Keeps compiled programs in a directory; the least recently used go when it outgrows max_bytes.

    Entries are keyed by program, compiler version and device, and written under a file lock, so that any number of
    processes can share the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", max_bytes)
    # Every bucket is worth keeping; small helper programs are not.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
