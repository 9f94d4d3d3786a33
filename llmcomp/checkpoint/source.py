"""Telling what a source is, and opening it."""

from __future__ import annotations

import re
from pathlib import Path

from llmcomp.checkpoint.adapter import AdaptedCheckpoint
from llmcomp.checkpoint.checkpoint import Checkpoint
from llmcomp.checkpoint.folder import FolderCheckpoint
from llmcomp.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def open(
    source: str | Path,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Open a folder, a .gguf file or a hub id; `revision` to `offline` are for hub ids. `offline` takes the cache and asks nobody. `adapter` is a
    folder with a PEFT adapter to merge.

    Raises:
        CheckpointError: it is none of these, or a file of it is wrong.
        HubError: the hub cannot be reached, or refuses.
    """
    try:
        opened = _open(source, revision, token, cache_dir, offline)
        return opened if adapter is None else AdaptedCheckpoint(opened, Path(adapter))
    except OSError as error:
        # A link whose target is gone, a folder named like a shard, a file that others may not read, a name that is too long.
        thing = error.filename if isinstance(error.filename, str) else str(source)
        raise CheckpointError(
            thing[:300], f"it cannot be read ({error.strerror or error})", "Check the path and who may read it; if it is a link, its target"
        ) from None


def _open(source: str | Path, revision: str | None, token: str | None, cache_dir: str | Path | None, offline: bool) -> Checkpoint:
    path = Path(source)
    if path.is_dir():
        return FolderCheckpoint(path, str(source))
    if path.suffix.lower() == ".gguf":
        from llmcomp.checkpoint.gguf import GGUFCheckpoint

        if not path.is_file():
            raise CheckpointError(str(source), "no such file", "Check the path")
        return GGUFCheckpoint(path, str(source))
    if path.is_file():
        raise CheckpointError(
            str(source), "it is a file, and not a .gguf", "Give the folder that holds config.json, a .gguf file or a hub id"
        )
    if path.is_absolute() or str(source).startswith((".", "~")) or not HUB_ID.fullmatch(str(source)):
        raise CheckpointError(str(source), "no such folder or file, and not a hub id either", "Check the path")
    from llmcomp.checkpoint.hub import download

    return FolderCheckpoint(download(str(source), revision, token, cache_dir, offline), str(source))
