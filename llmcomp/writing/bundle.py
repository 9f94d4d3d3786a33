"""The output folder: made in `OUT.partial/`, renamed when it is complete and verified. Either it works or it is not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmcomp.errors import DiskSpaceError, OutputError
from llmcomp.writing import resume
from llmcomp.writing.full import is_full

MARKER = ".llmcomp-partial"
OURS = ("report.json", "openvino_model.xml")
"""Files that tell an earlier output from a folder of something else."""
BLAMELESS = (KeyboardInterrupt, SystemExit, OSError, MemoryError)
"""What ends a run without saying anything about its work."""
SPARE = 64 << 20
"""Bytes of disk that tokenizer, XML and report may take beside the .bin."""


def check_output(output: Path, source: str, overwrite: bool) -> None:
    """The output folder can be made, and is nobody's data.

    Raises:
        OutputError: it exists (unless `overwrite` and it holds an exported model), is the source or holds it, or cannot be made.
    """
    here = Path(os.path.abspath(output))
    origin = Path(os.path.abspath(source))
    if origin.exists():
        origin, target = origin.resolve(), here.resolve()
        if target == origin or target in origin.parents:
            raise OutputError(str(output), "it is the input, or the folder that holds it", "Choose another output folder")
    if here.is_symlink() or here.exists():
        if not overwrite:
            raise OutputError(str(output), "it exists", "Choose another folder, or give --overwrite")
        if not here.is_dir() or here.is_symlink() or (any(here.iterdir()) and not any((here / name).is_file() for name in OURS)):
            raise OutputError(
                str(output), "it holds no exported model, so --overwrite does not remove it", "Remove it yourself, or choose another"
            )
    partial = partial_folder(here)
    if partial.exists() and not (partial / MARKER).is_file():
        raise OutputError(
            str(partial), "it exists and is not an unfinished output of llmcomp", "Remove it yourself, or choose another output"
        )
    parent = _existing_parent(here)
    if not parent.is_dir():
        raise OutputError(str(output), f"{parent} is not a folder", "Choose another folder")
    if not os.access(parent, os.W_OK):
        raise OutputError(str(output), f"no right to write into {parent}", "Choose another folder")


def partial_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _existing_parent(path: Path) -> Path:
    return next(p for p in (path.parent, *path.parent.parents) if p.exists())


def free_disk(output: Path) -> int:
    """Bytes that are free where the output, or its first parent that exists, is."""
    return shutil.disk_usage(_existing_parent(Path(os.path.abspath(output)))).free


def check_disk(output: Path, needed: int) -> None:
    """There is room for `needed` bytes and the small files.

    Raises:
        DiskSpaceError: with both figures.
    """
    free = free_disk(output)
    if free < needed + SPARE:
        raise DiskSpaceError(
            str(output),
            f"the output needs {(needed + SPARE) / 2**20:.0f} MiB and {free / 2**20:.0f} MiB are free",
            "Free some disk, or choose another",
        )


@contextlib.contextmanager
def bundle(output: Path, overwrite: bool, identity: Mapping[str, Any] | None = None, go_on: bool = False) -> Iterator[Path]:
    """The folder to fill. It becomes `output` when the block ends well. When it does not the folder is gone, unless what has ended it is no fault
    of the work, and some of that is finished: then it stays for another run to `go_on` with, and the error has its path as `kept`.

    `identity` says what the work is, for `resume.check`.

    Raises:
        DiskSpaceError: the disk ran full meanwhile.
    """
    output = Path(os.path.abspath(output))
    partial = partial_folder(output)
    made = [p for p in output.parents if not p.exists()]
    if go_on:
        resume.reopen(partial)
    else:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        (partial / MARKER).write_text("An unfinished output of llmcomp; safe to remove.\n", encoding="utf8")
        resume.begin(partial, identity or {})
    try:
        yield partial
        (partial / MARKER).unlink()
        shutil.rmtree(partial / resume.HOME)
        _publish(partial, output, overwrite)
    except BaseException as error:
        kept = isinstance(error, BLAMELESS) and resume.has_work(partial)
        if not kept:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if isinstance(error, OSError) and is_full(error):
            where = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            remedy = "Free some disk, raise the limit, or choose another"
            if kept:
                remedy = f"What is finished is in {partial}: free some disk, or raise the limit, and repeat with --resume"
            raise DiskSpaceError(str(output), f"the disk took no more ({where})", remedy) from error
        if kept:
            vars(error)["kept"] = partial
        raise


def _publish(partial: Path, output: Path, overwrite: bool) -> None:
    """Rename; an earlier output is moved aside first and removed last, so that a failure leaves one of the two."""
    old = None
    if output.exists():
        if not overwrite:
            raise OutputError(str(output), "it appeared while the export ran", "Choose another folder")
        old = output.with_name(f"{output.name}.old-{uuid.uuid4().hex[:8]}")
        output.rename(old)
    partial.rename(output)
    if old is not None:
        shutil.rmtree(old)
