"""Work whose length a client decides, out of the event loop's way.

A thread is enough: Python code gives the interpreter up every few milliseconds, tokenizers and grammar compilation do
not hold it at all, and what does hold it is bounded (`serve.body_shape`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from serve.errors import overloaded, timed_out

P = ParamSpec("P")
T = TypeVar("T")

SHORT = 4096
"""Characters, bytes or tokens up to which work is done at once: some 10 ms, and mostly much less."""

THREADS = 2
"""Long work of more clients waits; it would only share the processor."""


class Aside:
    """Two threads and the line in front of them."""

    def __init__(self, *, capacity: int, timeout_s: float, retry_after_s: int) -> None:
        """`capacity` requests may wait, each for `timeout_s` at most."""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="resin-aside")
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._pending = 0

    async def run(self, length: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns or raises; it runs right here if `length` is short.

        Raises:
            ApiError: 429 if too many wait, 504 if it takes too long.
        """
        if length <= SHORT:
            return function(*args, **kwargs)
        if self._pending >= self._capacity:
            raise overloaded(self._retry_after_s)
        self._pending += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Lets go of the threads; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
