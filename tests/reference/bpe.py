"""Byte-pair encoding from its definition: the adjacent pair of lowest rank is merged, again and again (Sennrich et al. 2016)."""

from __future__ import annotations

import itertools


def bpe(symbols: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """Merge one pre-token's symbols."""
    ranks = {pair: i for i, pair in enumerate(merges)}
    while len(symbols) > 1:
        pairs = [(ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        rank, at = min(pairs)
        if rank == len(ranks):
            break
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
    return symbols


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: printable Latin-1 stays, the rest is numbered from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printable}
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + sum(x not in printable for x in range(b)))
    return table


def encode(text: str, split: list[str], tokens: list[str], merges: list[tuple[str, str]]) -> list[int]:
    """Token ids of `text`, which `split` has cut into pre-tokens."""
    assert "".join(split) == text
    table, ids = byte_alphabet(), {t: i for i, t in enumerate(tokens)}
    return [ids[s] for piece in split for s in bpe([table[b] for b in piece.encode()], merges)]
