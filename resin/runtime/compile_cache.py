"""The persistent cache of compiled programs, shared between processes and bounded in size."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax

# The programs of a small model on a CPU take a few MB, those of a large one on a GPU a few hundred.
LEAST_FREE_BYTES = 64 << 20

_LOG = logging.getLogger("resin.runtime")
_HIT = "/jax/compilation_cache/cache_hits"
_hits = threading.local()


def cache_hits() -> int:
    """Programs that the cache has given to this thread."""
    return getattr(_hits, "count", 0)


def _note(event: str, **details: Any) -> None:
    if event == _HIT:
        _hits.count = cache_hits() + 1


jax.monitoring.register_event_listener(_note)


def use_compile_cache(directory: Path, max_bytes: int) -> bool:
    """Keeps compiled programs in a directory; the least recently used go when it outgrows max_bytes.

    Entries are keyed by program, compiler version and device, and written under a file lock, so that any number of
    processes can share the directory.

    Returns:
        False if nothing can be kept there, which is said once: programs are then compiled at every start.
    """
    fault = _why_unusable(directory)
    if fault is not None:
        warn_not_kept(directory, fault)
        return False
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", max_bytes)
    # Every bucket is worth keeping; small helper programs are not.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return True


@functools.cache
def warn_not_kept(directory: Path, fault: str) -> None:
    """Says once a process why programs cannot be kept."""
    _LOG.warning("compiled programs are not kept in %s: %s", directory, fault)


def _why_unusable(directory: Path) -> str | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            free = shutil.disk_usage(directory).free
    except OSError as error:
        return error.strerror or str(error)
    return f"the disk has only {free / 1e6:.1f} MB left" if free < LEAST_FREE_BYTES else None
