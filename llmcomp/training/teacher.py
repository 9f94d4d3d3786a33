"""What the teacher says of each token of the rows, kept on disk: its k likeliest next tokens, their log-probabilities and the mass of all others.

A folder holds three arrays without headers, mapped when read, and `teacher.json`: what they belong to and how many rows are finished. Its count is written
after the rows are on disk, so that a killed run goes on behind them.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from llmcomp.errors import DiskSpaceError, OptionError, OutputError
from llmcomp.training import logits
from llmcomp.training.atomic import write_text
from llmcomp.training.divergence import Targets

NAME = "teacher.json"
LIKELIEST = 64
"""Tokens kept of each position unless said."""
KEEP_SECONDS = 2.0
"""Between two times that rows are made sure to be on disk."""


def cache_bytes(rows: int, length: int, k: int, vocabulary: int) -> int:
    """Exact size of the arrays of a cache; `teacher.json` adds a few hundred bytes."""
    kept = min(k, vocabulary)
    return rows * length * (kept * (2 + _id_type(vocabulary).itemsize) + 4)


def _id_type(vocabulary: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocabulary <= 65536 else np.int32)


def _arrays(description: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of each file."""
    rows, length, k = (int(description[name]) for name in ("rows", "length", "k"))
    return {
        "log_p": ((rows, length, k), np.dtype(np.float16)),
        "ids": ((rows, length, k), _id_type(int(description["vocabulary"]))),
        "log_tail": ((rows, length), np.dtype(np.float32)),
    }


def digest(rows: NDArray[Any]) -> str:
    """Of token rows and their shape."""
    return xxhash.xxh3_128_hexdigest(f"{rows.shape}".encode() + np.ascontiguousarray(rows, np.int64).tobytes())


class TeacherCache:
    """The arrays of a folder, mapped: log_p [rows, length, k] f16 descending, ids of that shape, log_tail [rows, length] f32 (f16 would lose what matters
    of a tail near one)."""

    def __init__(self, folder: Path, description: dict[str, Any], writable: bool = False) -> None:
        self.folder, self.description = folder, description
        self.rows, self.length, self.k, self.vocabulary = (int(description[name]) for name in ("rows", "length", "k", "vocabulary"))
        arrays = []
        for name, (shape, dtype) in _arrays(description).items():
            path, size = folder / name, int(np.prod(shape)) * dtype.itemsize
            if writable and not path.exists():
                with path.open("wb") as file:
                    file.truncate(size)
            if not path.is_file() or path.stat().st_size != size:
                raise OutputError(
                    f"teacher cache {folder}", f"{name} is missing or not of {size} bytes", "Remove the folder and make it again"
                )
            arrays.append(np.memmap(path, dtype, "r+" if writable else "r", shape=shape))
        self.log_p, self.ids, self.log_tail = arrays

    @property
    def finished(self) -> int:
        """Rows that are on disk."""
        return int(self.description["finished"])

    def targets(self, indices: Sequence[int] | NDArray[np.int64]) -> Targets:
        """Of these rows, one after the other: [n, k], [n, k] and [n] with n = rows x length."""
        at = np.asarray(indices, np.int64)
        return Targets(
            torch.from_numpy(self.log_p[at].reshape(-1, self.k)),
            torch.from_numpy(self.ids[at].astype(np.int64).reshape(-1, self.k)),
            torch.from_numpy(self.log_tail[at].reshape(-1)),
        )

    def check(self, rows: NDArray[np.integer[Any]]) -> None:
        """
        Raises:
            OutputError: it is of other rows, or not finished.
        """
        _same(self.folder, self.description, {"rows_digest": digest(rows)})
        if self.finished < self.rows:
            raise OutputError(
                f"teacher cache {self.folder}", f"{self.finished} of {self.rows} rows are finished", "Go on with making it, or remove it"
            )

    def put(self, start: int, kept: Targets) -> int:
        """The rows from `start` on, and the one behind them."""
        stop = start + len(kept.log_p)
        self.log_p[start:stop], self.ids[start:stop], self.log_tail[start:stop] = (t.numpy() for t in kept)
        return stop

    def keep(self, finished: int) -> None:
        """As many rows are on disk, and said to be."""
        for array in (self.log_p, self.ids, self.log_tail):
            array.flush()
        self.description["finished"] = finished
        write_text(self.folder / NAME, json.dumps(self.description, indent=1))


def open_cache(folder: Path, rows: NDArray[np.integer[Any]], identity: str, k: int = LIKELIEST) -> TeacherCache:
    """A finished cache.

    Raises:
        OutputError: there is none, it is of another teacher, other rows or another k, or it is not finished.
    """
    if not (folder / NAME).is_file():
        raise OutputError(f"teacher cache {folder}", "there is none", "Make it first")
    description = json.loads((folder / NAME).read_text(encoding="utf8"))
    _same(folder, description, {"identity": identity, "k": min(k, int(description["vocabulary"]))})
    cache = TeacherCache(folder, description)
    cache.check(rows)
    return cache


def write_cache(
    folder: Path,
    teacher: Any,
    rows: NDArray[np.integer[Any]],
    identity: str,
    k: int = LIKELIEST,
    batch_rows: int = 1,
    tell: Callable[[int, int], None] | None = None,
) -> TeacherCache:
    """The teacher's distributions behind every token of rows [rows, length], in f32 of a model in any type; goes on where a killed run stopped.
    One process writes; others of the same run open it afterwards.

    `identity` says which teacher it is: another one's cache is refused, as is one of other rows or another k. `tell(finished, rows)` after each batch.

    Raises:
        OptionError: rows that are no matrix, that are empty or have tokens outside the vocabulary; k below one.
        OutputError: the folder holds another cache.
        DiskSpaceError: no room for it.
    """
    vocabulary = logits.vocabulary_of(teacher)
    _check_rows(rows, vocabulary, k)
    kept = min(k, vocabulary)
    wanted = {
        "identity": identity,
        "rows_digest": digest(rows),
        "rows": rows.shape[0],
        "length": rows.shape[1],
        "k": kept,
        "vocabulary": vocabulary,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / NAME).is_file():
        description = json.loads((folder / NAME).read_text(encoding="utf8"))
        _same(folder, description, wanted)
    else:
        size, free = cache_bytes(rows.shape[0], rows.shape[1], k, vocabulary), shutil.disk_usage(folder).free
        if size > free:
            raise DiskSpaceError(f"teacher cache {folder}", f"it takes {size:,} bytes, {free:,} are free", "Keep fewer rows or a smaller k")
        description = {**wanted, "finished": 0}
        for name in _arrays(wanted):
            (folder / name).unlink(missing_ok=True)
        write_text(folder / NAME, json.dumps(description, indent=1))
    cache = TeacherCache(folder, description, writable=True)
    if cache.finished < cache.rows:
        _fill(cache, teacher, rows, batch_rows, tell)
    return TeacherCache(folder, cache.description)


def _check_rows(rows: NDArray[np.integer[Any]], vocabulary: int, k: int) -> None:
    if rows.ndim != 2 or not rows.size:
        raise OptionError("token rows", f"they have the shape {rows.shape}", "Give at least one row of at least one token")
    if rows.min() < 0 or rows.max() >= vocabulary:
        found = f"they hold {rows.min()} to {rows.max()}, the teacher has {vocabulary} tokens"
        raise OptionError("token rows", found, "Use the tokenizer of the teacher")
    if k < 1:
        raise OptionError(f"k = {k}", "no token would be kept", "Give at least 1")


def _same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    words = {"identity": "teacher", "rows_digest": "digest of the rows", "rows": "number of rows", "length": "length of a row"}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise OutputError(
                f"teacher cache {folder}",
                f"its {words.get(key, key)} is {found.get(key)}, not {value}",
                "Give another folder, or remove this one",
            )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _fill(
    cache: TeacherCache, teacher: Any, rows: NDArray[np.integer[Any]], batch_rows: int, tell: Callable[[int, int], None] | None
) -> None:
    was = teacher.training
    teacher.eval()
    reading = logits.read(teacher)
    weight, bias = logits.head_of(teacher, reading)
    device = next(teacher.parameters()).device
    # Where only the teacher's own forward pass makes logits, those of a row are the least that is in memory.
    batch = 1 if reading.whole else batch_rows
    start, kept_at = cache.finished, time.monotonic()
    while start < cache.rows:
        ids = torch.from_numpy(np.asarray(rows[start : start + batch], np.int64)).to(device)
        hidden = logits.hidden_states(teacher, reading, ids).flatten(0, 1)
        parts = [
            likeliest(logits.logits_of(h, weight, bias, reading), cache.k) for h in hidden.split(logits.chunk_tokens(cache.vocabulary))
        ]
        whole = Targets(*(torch.cat(list(part)).reshape(len(ids), cache.length, -1).cpu() for part in zip(*parts, strict=True)))
        stored = Targets(whole.log_p.half(), whole.ids.to(_torch_id_type(cache.vocabulary)), whole.log_tail.squeeze(-1))
        start = cache.put(start, stored)
        if start == cache.rows or time.monotonic() - kept_at >= KEEP_SECONDS:
            cache.keep(start)
            kept_at = time.monotonic()
        if tell is not None:
            tell(start, cache.rows)
    teacher.train(was)


def _torch_id_type(vocabulary: int) -> Any:
    return torch.uint16 if vocabulary <= 65536 else torch.int32


def likeliest(z: torch.Tensor, k: int) -> Targets:
    """The k largest log-probabilities of logits [n, vocabulary], descending, and the rest's mass, summed over the rest itself."""
    log_z = torch.logsumexp(z, -1)
    values, ids = z.topk(k, -1)
    log_tail = torch.logsumexp(z.scatter(1, ids, -torch.inf), -1) - log_z
    return Targets(values - log_z[:, None], ids, log_tail)
