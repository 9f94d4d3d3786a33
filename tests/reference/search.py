"""Trying every candidate scale of a group, one after the other in float64."""

from __future__ import annotations

import numpy as np

from llmcomp import formats
from llmcomp.formats import NUMPY


def least_error(fmt: formats.Format, w: np.ndarray) -> np.ndarray:
    """[rows, groups]: the least weighted squared error of any of the format's candidates, each group alone."""
    size = formats.grouped_shape(w.shape, fmt.group_size)[-1]
    errors = np.empty((len(w), w.shape[1] // size))
    for row in range(errors.shape[0]):
        for g in range(errors.shape[1]):
            group = w[row, g * size : (g + 1) * size].reshape(1, 1, size)
            weight = np.abs(group) ** fmt.search_power
            tried = []
            for ranges in fmt.candidates(NUMPY, group, weight):
                back = fmt.decode(NUMPY, fmt.encode(NUMPY, group, **ranges), **ranges)
                tried.append(float((weight.astype(np.float64) * (group.astype(np.float64) - back) ** 2).sum()))
            errors[row, g] = min(tried)
    return errors
