"""Bytes of a file as memory, for as long as somebody looks at them."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmcomp.errors import CheckpointError


def read_ahead(file: Path, begin: int, end: int) -> None:
    """Ask the system to have these bytes of `file` in memory soon, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)


def map_bytes(file: Path, begin: int, end: int, private: bool = True) -> NDArray[np.uint8]:
    """Bytes [begin, end) of `file`, 1-D; the mapping ends with the last array that looks at it.

    Copy-on-write where it is `private`, because the runtime shares memory only with writable arrays; nothing is written. The system may
    set aside memory for all that such a mapping could change, so it must never be a whole file. Read-only otherwise.

    Raises:
        CheckpointError: the file is gone or shorter than it was when its header was read.
    """
    if begin == end:
        return np.zeros(0, np.uint8)
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    try:
        # Not numpy's memmap, which resolves the path at every call: 0.15 ms, and there is one for each tile.
        page = begin - begin % mmap.ALLOCATIONGRANULARITY
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), end - page, access=access, offset=page)
        return np.frombuffer(mapped, np.uint8, offset=begin - page)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            str(file), f"it can no longer be read ({error})", "Do not move or change a checkpoint while it is in use"
        ) from None
