"""The list of finished layers, one JSON line each, with a checksum for every row tile; what verification compares against."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

NAME = "journal.jsonl"


class Journal:
    """Appends finished layers; a line is on disk before the next layer is said to be finished."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf8")
        self._lock = threading.Lock()

    def add(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def checksum(data: Any, before: int = 0) -> int:
    """Of bytes that follow others whose checksum was `before`: XXH3, 64 bits, which costs nothing beside writing (CRC-32 takes as long)."""
    return xxhash.xxh3_64_intdigest(data, before)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The finished layers. A last line that a crash cut short is not one."""
    with path.open(encoding="utf8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
