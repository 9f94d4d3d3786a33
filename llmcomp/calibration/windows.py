"""A stream of text cut into disjoint windows of tokens, without reading or tokenizing more of it than they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from llmcomp.calibration.items import Text

LOOKAHEAD = 1024
"""Tokens behind the last one wanted that are made as well: what comes later cannot change those in front, a tokenizer sees no further than a word."""
CHARACTERS = 8
"""Characters for each token at the first try: English has four or five, source code and Chinese fewer."""
BETWEEN = "\n\n"
"""A blank line, as papers join the rows of WikiText."""


def cut(texts: Iterable[Text], encode: Callable[[str], NDArray[np.int64]], count: int, length: int) -> list[NDArray[np.int64]]:
    """The first `count` windows of `length` tokens, in order, the last one shorter where the text ends in it. Documents are joined by a blank line.

    The tokens are those that the whole text has: it is not tokenized window by window.
    """
    wanted = count * length
    pieces = _joined(texts)
    held: list[str] = []
    size, more, total = CHARACTERS * (wanted + LOOKAHEAD), True, 0
    while True:
        while more and total < size:
            piece = next(pieces, None)
            more = piece is not None
            if piece is not None:
                held.append(piece)
                total += len(piece)
        held = ["".join(held)]
        ids = encode(held[0][:size])
        if len(ids) >= wanted + LOOKAHEAD or not (more or total > size):
            break
        size *= 2
    if not held[0] or held[0].isspace():
        return []
    return [ids[start : start + length] for start in range(0, min(len(ids), wanted), length)]


def _joined(texts: Iterable[Text]) -> Iterator[str]:
    for i, text in enumerate(texts):
        yield BETWEEN + text.content if i and text.begins else text.content
