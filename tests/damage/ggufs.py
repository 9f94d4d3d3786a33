"""Damage to the header of a .gguf file."""

from __future__ import annotations

import struct
from random import Random

from tests.damage.change import Damage, cut, flipped, replaced


def gguf_bytes(random: Random, raw: bytes) -> bytes:
    """In the header, of which the vocabulary is the larger part: its beginning and its end more often than that."""
    end = raw.index(b"token_embd.weight") + 1000
    begin = raw.index(b"tokenizer.ggml.tokens")
    limit = random.choice((begin, begin, end))
    start = 0 if limit == begin or random.random() < 0.3 else raw.index(b"tokenizer.chat_template")
    return raw[:start] + random.choice((flipped, replaced))(random, raw[start:], limit - start)


GGUF_KEYS = (
    "block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv", "rope.dimension_count",
    "context_length",
)  # fmt: skip


def gguf_value(random: Random, raw: bytes) -> bytes:
    """Of a u32 of the metadata."""
    key = f"llama.{random.choice(GGUF_KEYS)}".encode()
    at = raw.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    return raw[:at] + struct.pack("<I", random.choice((0, 1, 3, 5, 7, 96, 1 << 20, 1 << 31, (1 << 32) - 1))) + raw[at + 4 :]


def gguf_count(random: Random, raw: bytes) -> bytes:
    at = random.choice((4, 8, 16))
    return raw[:at] + struct.pack("<Q", random.choice((0, 1, 2, 1 << 20, 1 << 40, (1 << 64) - 1))) + raw[at + 8 :]


def gguf(random: Random) -> Damage:
    what, change = random.choice((("bytes", gguf_bytes), ("bytes", gguf_bytes), ("value", gguf_value), ("count", gguf_count), ("cut", cut)))
    return Damage("gguf", "m.gguf", what, change, ("metadata",))
