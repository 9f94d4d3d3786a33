"""What a data set gives, as a model takes it: a mapping by keyword, a tuple or list by position, anything else as the one argument."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import nn

from llmcomp.errors import CalibrationError


def feed(model: nn.Module, item: Any) -> Any:
    """What the model answers to an item."""
    if isinstance(item, Mapping):
        return model(**item)
    if isinstance(item, tuple | list):
        return model(*item)
    return model(item)


def items(dataset: Iterable[Any], count: int | None = None) -> Iterator[Any]:
    """The first `count` items; all when None. A data set with NNCF's `get_inference_data` gives what its transformation makes.

    Raises:
        CalibrationError: it is empty.
    """
    source = dataset.get_inference_data() if hasattr(dataset, "get_inference_data") else dataset
    given = False
    for item in islice(iter(source), count):
        given = True
        yield item
    if not given:
        raise CalibrationError("calibration data", "it is empty", "Give at least one item, such as a batch of inputs")
