"""Damage to the index of a checkpoint in shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.damage.change import JUNK, NAMES, Change, Damage, cut, dumped, flipped, foreign, replaced

ELSEWHERE = (
    "../x.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\b", "C:x", "config.json", "model.safetensors.index.json",
    "no.safetensors", "x\0y", "\x1b[2J", "x" * 300, "x" * 100_000, 3, None, True, ["x"], {"x": "y"}, 1e9,
)  # fmt: skip


def in_map(edit: Callable[[Random, dict[str, Any], str], None]) -> Change:
    def change(random: Random, raw: bytes) -> bytes:
        index = json.loads(raw)
        edit(random, index["weight_map"], random.choice(list(index["weight_map"])))
        return dumped(index)

    return change


def other_home(random: Random, weight_map: dict[str, Any], name: str) -> None:
    weight_map[name] = random.choice([one for one in weight_map.values() if one != weight_map[name]])


def other_file(random: Random, weight_map: dict[str, Any], name: str) -> None:
    """Of one tensor, or of all that are in its file."""
    old, new = weight_map[name], random.choice(ELSEWHERE)
    every = random.random() < 0.5
    weight_map |= {key: new for key, value in weight_map.items() if key == name or (every and value == old)}


def other_index(random: Random, raw: bytes) -> bytes:
    index = json.loads(raw)
    key = random.choice(("weight_map", "metadata", "other"))
    if random.random() < 0.2:
        index.pop(key, None)
    else:
        index[key] = random.choice((*JUNK, {"total_size": random.choice(JUNK)}))
    return dumped(index)


INDEX: dict[str, Change] = {
    "home": in_map(other_home),
    "file": in_map(other_file),
    "file again": in_map(other_file),
    "missing": in_map(lambda _, weight_map, name: weight_map.pop(name) and None),
    "one more": in_map(lambda random, weight_map, name: weight_map.update({random.choice((*NAMES, "more.weight")): weight_map[name]})),
    "key": other_index,
    "bytes": lambda random, raw: random.choice((flipped, replaced, cut, foreign))(random, raw),
}


def index(random: Random) -> Damage:
    what = random.choice(list(INDEX))
    return Damage("sharded", "model.safetensors.index.json", what, INDEX[what], ("model-0",))
