"""Sizes as people write them."""

from __future__ import annotations

import re

from llmcomp.errors import OptionError

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
SAME = "same"
"""As large as without a budget."""


def parse_size(value: object) -> object:
    """Bytes of `3.5GB`, `900 MiB` or a plain number, rounded down; `same`, None and what is no text are left for others to judge.

    Raises:
        OptionError: no number, less than a byte, or no such unit.
    """
    if not isinstance(value, str) or value.strip().lower() == SAME:
        return SAME if isinstance(value, str) else value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in UNITS:
        raise OptionError(
            f"--target-size {value}", "it is not a number of bytes, KB, MB, GB, KiB, MiB or GiB", "Write for example 3.5GB or 900MiB"
        )
    whole, _, part = match[1].partition(".")
    # In integers: 0.7 GB is 700,000,000 bytes and not one less.
    nbytes = int(f"{whole or 0}{part}") * UNITS[match[2].lower()] // 10 ** len(part)
    if not nbytes:
        raise OptionError(f"--target-size {value}", "no model fits into that", "Write for example 3.5GB or 900MiB")
    return nbytes
