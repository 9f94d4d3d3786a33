"""Scale search: several scales are tried for each group, and the one of least weighted squared error is kept.

The error is measured with the scale as it will be stored. Each weight's square error counts with its importance, if one is given (the second
moment of its input), and with a power of the weight's own magnitude: large weights matter more than an even count says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcomp.formats import Format, Namespace


def search(xp: Namespace, fmt: Format, w: Any, importance: Any = None) -> Mapping[str, Any]:
    """Scale [and zero_point] of each group of w, f32, from `fmt.candidates`.

    `importance` [1, groups, size] or None. Of equal errors the earlier candidate wins; the first is `minmax`.
    """
    weight = xp.abs(w) if importance is None else xp.multiply(xp.abs(w), importance)
    best: dict[str, Any] | None = None
    least: Any = None
    for ranges in fmt.candidates(xp, w, weight):
        back = fmt.decode(xp, fmt.encode(xp, w, **ranges), **ranges)
        difference = xp.subtract(w, back)
        error = xp.sum(xp.multiply(xp.multiply(difference, difference), weight))
        if best is None:
            best, least = dict(ranges), error
            continue
        better = xp.less(error, least)
        best = {name: xp.where(better, value, best[name]) for name, value in ranges.items()}
        least = xp.where(better, error, least)
    assert best is not None
    return best
