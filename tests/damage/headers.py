"""Damage to the header of a safetensors file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.damage.change import DEEP, JUNK, NAMES, SIZES, Change, Damage, cut, flipped, put, replaced
from tests.damage.read import joined, split

DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "bf16", "F17", "", None, 3,
    ["BF16"],
)  # fmt: skip
SAME_SIZE = {"BF16": ("F16", "I16", "U16"), "F32": ("I32", "U32")}


def in_header(edit: Callable[[Random, dict[str, Any], str], Any]) -> Change:
    """`edit` changes the header, given the name of one of its tensors, or returns what takes its place."""

    def change(random: Random, raw: bytes) -> bytes:
        header, data = split(raw)
        found = edit(random, header, random.choice([n for n in header if n != "__metadata__"]))
        return joined(header if found is None else found, data)

    return change


def in_entry(key: str, values: Callable[[Random, Any], Any]) -> Change:
    return in_header(lambda random, header, name: put(header, (name, key), values(random, header[name][key])))


def other_length(random: Random, raw: bytes) -> bytes:
    length = struct.unpack_from("<Q", raw)[0]
    return (
        struct.pack(
            "<Q",
            random.choice(
                (0, 1, length - 1, length + 1, len(raw) - 8, len(raw), 1 << 31, 100_000_000, 100_000_001, 1 << 63, (1 << 64) - 1)
            ),
        )
        + raw[8:]
    )


def in_place(random: Random, raw: bytes) -> bytes:
    limit = 8 + struct.unpack_from("<Q", raw)[0]
    return random.choice((flipped, replaced))(random, raw, limit)


def other_offsets(random: Random, offsets: list[int]) -> Any:
    begin, end = offsets
    odd = random.choice((-1, 0, 1 << 40, 1 << 63, 10**30, 0.5, None, "0", True, float("nan"), [0]))
    return random.choice(
        (
            [-1, end],
            [begin, end + 2],
            [begin + 2, end + 2],
            [begin - 2, end - 2],
            [end, begin],
            [0, end - begin],
            [begin],
            [begin, end, end],
            [odd, end],
            [begin, odd],
            odd,
            {},
            [float(begin), float(end)],
        )
    )


def other_shape(random: Random, shape: list[int]) -> Any:
    odd = random.choice(SIZES)
    product = 1
    for d in shape:
        product *= d
    return random.choice(
        (
            [odd, *shape[1:]],
            [*shape[:-1], odd],
            [*shape, 1],
            [1, *shape],
            shape[::-1],
            [product],
            [product // 2, 2],
            [*shape, *[1] * 20],
            [],
            odd,
            [shape],
            [10**9, 10**9],
            [1 << 32, 1 << 32],
        )
    )


def other_dtype(random: Random, dtype: str) -> Any:
    return random.choice(SAME_SIZE.get(dtype, ("U8",)) if random.random() < 0.3 else DTYPES)


def renamed(random: Random, header: dict[str, Any], name: str) -> None:
    header[random.choice((*NAMES, name + "x", name.upper(), name.replace("0", "00"), name.replace("model.", "")))] = header.pop(name)


def exchanged(random: Random, header: dict[str, Any], name: str) -> None:
    """With another tensor, of the same shape if there is one."""
    others = [n for n in header if n not in (name, "__metadata__")]
    same = [n for n in others if header[n]["shape"] == header[name]["shape"]]
    other = random.choice(same or others)
    header[name], header[other] = header[other], header[name]


def twice(random: Random, header: dict[str, Any], name: str) -> bytes:
    text = json.dumps(header).encode()
    return b"{%s: %s, " % (json.dumps(name).encode(), json.dumps(header[name]).encode()) + text[1:]


def metadata(random: Random, header: dict[str, Any], name: str) -> None:
    header["__metadata__"] = random.choice((*JUNK, {"format": "pt"}, {"format": "tf"}, {"format": 3}, {"x": ["y"]}))


def text_of(random: Random, header: dict[str, Any], name: str) -> bytes:
    """The same or no JSON, in another coding or with something around it."""
    text = json.dumps(header).encode()
    return random.choice(
        (
            text + b" " * random.randrange(1, 5000),
            b" " + text,
            b"\xef\xbb\xbf" + text,
            text.decode().encode("utf-16"),
            text + b"x",
            text + text,
            text.replace(b"BF16", b"B\xff16"),
            text + b"\0" * 7,
            DEEP,
            b'{"a":' * 60_000,
        )
    )


def numbers_of(random: Random, header: dict[str, Any], name: str) -> bytes:
    """A number that JSON readers disagree about."""
    text = json.dumps(header).encode()
    end = b"%d]" % header[name]["data_offsets"][1]
    return text.replace(end, random.choice((b"NaN]", b"Infinity]", b"1" * 5000 + b"]", b"1e3]", end[:-1] + b".0]", b"0x10]", b"-0]")), 1)


HEADER: dict[str, tuple[Change, int]] = {
    "bytes": (in_place, 5),
    "cut": (cut, 2),
    "longer": (lambda random, raw: raw + bytes(random.randrange(1, 100)), 1),
    "length": (other_length, 2),
    "offsets": (in_entry("data_offsets", other_offsets), 5),
    "shape": (in_entry("shape", other_shape), 5),
    "dtype": (in_entry("dtype", other_dtype), 4),
    "no entry": (in_header(lambda _, header, name: header.pop(name) and None), 1),
    "no key": (in_header(lambda random, header, name: header[name].pop(random.choice(("dtype", "shape", "data_offsets"))) and None), 1),
    "entry": (in_header(lambda random, header, name: header.update({name: random.choice(JUNK)})), 1),
    "one more": (in_header(lambda random, header, name: header.update({random.choice(NAMES): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})), 1),
    "more in it": (in_header(lambda random, header, name: header[name].update({random.choice(NAMES): random.choice(JUNK)})), 1),
    "name": (in_header(renamed), 4),
    "exchanged": (in_header(exchanged), 2),
    "twice": (in_header(twice), 1),
    "metadata": (in_header(metadata), 2),
    "text": (in_header(text_of), 2),
    "number": (in_header(numbers_of), 1),
}  # fmt: skip


def header(random: Random) -> Damage:
    source = random.choice(("llama", "llama", "qwen3", "mixture", "gpt2", "gptq"))
    what = random.choices(list(HEADER), [weight for _, weight in HEADER.values()])[0]
    return Damage(source, "model.safetensors", what, HEADER[what][0])


SURVIVED = ("metadata", "text", "exchanged", "dtype", "more in it", "name")
"""What a file may live through: of the sources that a twin can follow."""


def survived(random: Random) -> Damage:
    what = random.choice(SURVIVED)
    return Damage(random.choice(("plain", "qwen3", "gpt2")), "model.safetensors", what, HEADER[what][0])
