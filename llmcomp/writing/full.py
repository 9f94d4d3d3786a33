"""What a full disk looks like, here and in a child process."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EFBIG, *([errno.EDQUOT] if hasattr(errno, "EDQUOT") else []))
"""No room: on the disk, for a file of this size, or for this user."""


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def told_of(output: str) -> OSError | None:
    """The error of which the traceback of a child process tells, if it ended for want of room."""
    return next((OSError(number, os.strerror(number)) for number in FULL if os.strerror(number) in output), None)
