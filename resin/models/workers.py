"""Threads that a caller hands work to and waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def worker_pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool that is left at once on Ctrl-C, which nobody wants to wait a compilation for.

    After an error work that has not begun is dropped and the rest waited for; after an interrupt neither. Threads that
    still run then end when their work does, at the latest before the interpreter.

    Args:
        threads: at most.
        name: what thread names begin with.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    try:
        yield pool
    except BaseException as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    pool.shutdown()
