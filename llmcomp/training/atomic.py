"""Files and folders that are there whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file, or a folder with what lies in it, is on disk."""
    if path.is_dir():
        for inner in path.iterdir():
            sync(inner)
        sync_entry(path)
        return
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_entry(folder: Path) -> None:
    """The names in a folder are on disk; Windows opens no folders, and keeps names by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(partial: Path, path: Path) -> None:
    """`partial` takes the place of `path`, which must be a file or not be there."""
    sync(partial)
    partial.replace(path)
    sync_entry(path.parent)


def write_text(path: Path, text: str) -> None:
    """As a whole: a reader finds the text of before or this."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf8")
    move(partial, path)
