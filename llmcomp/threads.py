"""Threads to compute with.

comes in: nothing
goes out: how many there are, and functions mapped over them
may import: nothing
read first: Threads
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

T = TypeVar("T")


def workers() -> int:
    """As many as there are cores for this process."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class Threads(AbstractContextManager["Threads"]):
    """While they are in use, BLAS has one thread in each: its own would wait for work by running idle, and those of numpy's and scipy's BLAS
    and of OpenVINO then take turns on the same cores (measured on two: second-order rounding half as fast as with one)."""

    def __init__(self, count: int | None = None) -> None:
        self.count = workers() if count is None else count
        self._pool: ThreadPoolExecutor | None = None
        self._limits: Any = None

    def __enter__(self) -> Threads:
        if self.count > 1:
            self._pool, self._limits = ThreadPoolExecutor(self.count, "llmcomp"), threadpool_limits(1, "blas")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._limits.restore_original_limits()
            self._pool = None

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Results in the order of the items; in this thread before the `with` statement."""
        return [function(item) for item in items] if self._pool is None else list(self._pool.map(function, items))
