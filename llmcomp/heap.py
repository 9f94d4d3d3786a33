"""What glibc's allocator keeps of memory that was freed. Elsewhere nothing is done: other allocators give it back by themselves."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""


def map_large_arrays() -> None:
    """For the whole process: arrays of 1 MiB and more are mapped by themselves. glibc learns from what is freed to take those of up to 32 MiB from its heap,
    where small ones that stay lock the room of large ones that went: while a start was put into a model of 222 M weights, 700 MiB came on top of
    it, and 240 MiB with a threshold that stands still."""
    _call("mallopt", MMAP_THRESHOLD, 1 << 20)


def trim() -> None:
    """What lies free between arrays that were in use goes back to the system."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
