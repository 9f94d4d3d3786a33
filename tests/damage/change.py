"""Damage: changes of one file of a source, the same for the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

Change = Callable[[Random, bytes], bytes]
"""Of the bytes of a file."""

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 63, 10**9, 10**12, 1 << 63, 10**30, 10**400, 0.5, -2.0, 1e308, float("nan"), float("inf"), float("-inf"),
    "", "x", "16", "llama", "../../etc/passwd", "\x1b[2J", "\ud800", "x" * 100_000, [], [1, 2], [None], [[]], ["x"], {}, {"a": 1}, {"rope_type": "linear"},
)  # fmt: skip
SIZES = (-1, 0, 1, 15, 17, 31, 65, 1 << 20, 10**9, 10**12, 1 << 62, 1 << 64, 10**30, 8.0, 0.5, "16", None, True, [16], {})
NAMES = (
    "", "../x", "/etc/passwd", "a\nb", "\x1b[2J", "\u202eweight", "\ud800", "é", "x" * 2000, "model..weight", " ", "lm_head.weight",
    "__metadata__",
)  # fmt: skip
DEEP = b"[" * 100_000
FOREIGN: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", DEEP, b'{"a":' * 50_000, b'{"a": NaN}', b'{"a": ' + b"1" * 6000 + b"}",
    b"\xff\xfe{\0}\0", b"\0" * 64, b"\x80abc",
)  # fmt: skip
"""Whole contents of a JSON file."""


class Damage(NamedTuple):
    """What is done to a file of a source, and the words of which a message about it has to hold one."""

    source: str
    file: str
    what: str
    change: Change
    words: tuple[str, ...] = ()

    def apply(self, folder: Path, seed: int) -> None:
        path = folder / self.file
        path.write_bytes(self.change(Random(seed), path.read_bytes()))


def flipped(random: Random, raw: bytes, limit: int | None = None) -> bytes:
    damaged = bytearray(raw)
    for _ in range(random.randint(1, 5)):
        damaged[random.randrange(limit or len(raw))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def replaced(random: Random, raw: bytes, limit: int | None = None) -> bytes:
    damaged = bytearray(raw)
    for _ in range(random.randint(1, 5)):
        damaged[random.randrange(limit or len(raw))] = random.choice(b'0123456789"{}[],:-. \0\xffabc')
    return bytes(damaged)


def cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(len(raw))]


def foreign(random: Random, raw: bytes) -> bytes:
    return random.choice(FOREIGN)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def put(place: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*before, key)
        yield from paths(inner, (*before, key))


def json_way(random: Random, fields: tuple[str, ...] = ()) -> tuple[str, Change, tuple[str, ...]]:
    """Anything in a JSON object replaced or removed, or one of `fields` set."""
    way = random.randrange(12)
    if way == 0:
        return "flipped", flipped, ()
    if way == 1:
        return "replaced", replaced, ()
    if way == 2:
        return ("cut", cut, ()) if random.random() < 0.5 else ("foreign", foreign, ())
    value = random.choice(JUNK)
    if fields and way < 9:
        name = random.choice(fields)
        if way == 3:
            return f"no {name}", lambda _, raw: dumped({k: v for k, v in json.loads(raw).items() if k != name}), (name,)
        return f"{name} = {ascii(value)[:40]}", lambda _, raw: dumped({**json.loads(raw), name: value}), (name,)

    def change(inner: Random, raw: bytes) -> bytes:
        whole = json.loads(raw)
        there = list(paths(whole))
        if there:
            put(whole, inner.choice(there), value)
        return dumped(whole)

    return f"something = {ascii(value)[:40]}", change, ()
