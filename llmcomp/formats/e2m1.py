"""The four-bit float E2M1: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives (OCP Microscaling Formats 1.0, 5.3.3)."""

from __future__ import annotations

from typing import Any

from llmcomp.formats.array import Namespace

MAX = 6.0
TYPE = "f4e2m1"
SIGN = 8.0
"""What a negative weight's code has more than its magnitude's."""


def encode(xp: Namespace, x: Any) -> Any:
    """x in [-6, 6] -> code 0 .. 15 of the nearest value, half to even. A zero has code 0 whatever its sign bit; -0.1 has 8, minus zero."""
    a = xp.abs(x)
    # The steps are 1/2 below 2, 1 below 4, 2 from there: each octave is a rounding of its own, so ties go to the even code by themselves.
    octaves = [
        xp.clip(xp.round(xp.multiply(a, 2.0)), 0.0, 4.0),
        xp.subtract(xp.clip(xp.round(a), 2.0, 4.0), 2.0),
        xp.subtract(xp.clip(xp.round(xp.multiply(a, 0.5)), 2.0, 3.0), 2.0),
    ]
    magnitude = xp.add(xp.add(octaves[0], octaves[1]), octaves[2])
    return xp.add(magnitude, xp.where(xp.less(x, 0.0), SIGN, 0.0))


def decode(xp: Namespace, codes: Any) -> Any:
    """Code -> value."""
    return xp.lookup((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0), codes)
