"""What an unfinished export leaves in `OUT.partial/.resume/`, and what of it another run may go on from; a folder there for each submodel.

Whoever goes on must do the same work: the identity says what the work is, part by part. Bytes of the .bin count as finished if they have the
checksums in the journal; whatever a crash or a power cut has lost is computed again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmcomp.errors import OutputError
from llmcomp.graph.layer import Layer
from llmcomp.writing import journal
from llmcomp.writing.layout import Layout
from llmcomp.writing.verify import disagreement

HOME = ".resume"
IDENTITY, JOURNAL, PLAN, STATE = "identity.json", "journal.jsonl", "plan.json", "state.json"
SAMPLES, MEASURED = "samples.json", "measured.json"
BIN = "model.bin"
SHOWN = 4
"""Differences that are told."""


def begin(folder: Path, identity: Mapping[str, Any]) -> None:
    """Record in a new unfinished output what work it is."""
    (folder / HOME).mkdir()
    _write_json(folder / HOME / IDENTITY, identity)


def check(folder: Path, identity: Mapping[str, Any]) -> None:
    """The unfinished output in `folder` is of this work.

    Raises:
        OutputError: there is none, or what differs.
    """
    path = folder / HOME / IDENTITY
    if not path.is_file():
        raise OutputError("--resume", f"{folder} holds no unfinished export to go on with", "Leave it out")
    try:
        before = json.loads(path.read_text(encoding="utf8"))
        assert isinstance(before, dict)
    except (ValueError, AssertionError):
        raise OutputError(str(path), "it is damaged", "Leave --resume out, and the export begins anew") from None
    # As JSON has it: a tuple comes back as a list.
    now = json.loads(json.dumps(identity))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        told = "; ".join(f"{key} was {_short(before.get(key))}, now {_short(now.get(key))}" for key in differing[:SHOWN])
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise OutputError("--resume", f"the unfinished export is of other work: {told}{more}", "Repeat what was asked for, or leave it out")


def reopen(folder: Path) -> None:
    """Leave of an unfinished output what can be gone on with: everything else is quickly made anew."""
    for home in (path for path in (folder / HOME).iterdir() if path.is_dir()):
        written = folder / f"{home.name}.bin"
        if written.is_file():
            written.replace(home / BIN)
    for path in folder.iterdir():
        if path.name != HOME and not path.name.startswith(".llmcomp"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def has_work(folder: Path) -> bool:
    """Whether going on would spare anything: layers, the state of calibration, text that the model wrote, what was measured."""
    return any(path.stat().st_size for name in (JOURNAL, STATE, SAMPLES, MEASURED) for path in (folder / HOME).glob(f"*/{name}"))


class Unfinished:
    """The state of one (sub)model: what is finished of its .bin, what was looked at and measured, where calibration stands."""

    def __init__(self, folder: Path, model: str = "openvino_model") -> None:
        self.folder, self.home, self.bin = folder, folder / HOME / model, folder / f"{model}.bin"
        self.home.mkdir(exist_ok=True)

    @property
    def journal(self) -> Path:
        return self.home / JOURNAL

    def take_up(self, plan: str, layers: Sequence[Layer], layout: Layout, wanted: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
        """Layer -> its journal record, of those whose bytes are in the .bin as they were computed; all of it is gone if `plan` is another one.

        `layers` are all that are stored; of these `wanted` names the ones that may count.
        """
        records: dict[str, dict[str, Any]] = {}
        before, kept = self.home / PLAN, self.home / BIN
        if before.is_file() and before.read_text(encoding="utf8") == plan and kept.is_file() and self.journal.is_file():
            by_name = {layer.name: layer for layer in layers if wanted(layer.name)}
            with kept.open("rb") as file:
                for record in journal.read(self.journal):
                    layer = by_name.get(record["layer"])
                    # Scales in the tail are written last.
                    if layer is not None and not record["tail"] and disagreement(file, layer, record, layout, {}) is None:
                        records[layer.name] = record
            kept.replace(self.bin)
        else:
            self.forget()
            before.write_text(plan, encoding="utf8")
        # What is not to be counted must not be found by the next run either.
        with _replacing(self.journal) as path:
            path.write_text("".join(json.dumps(record) + "\n" for record in records.values()), encoding="utf8")
        return records

    def forget(self) -> None:
        """Begin anew: another plan, or another model under a budget."""
        for path in (self.journal, self.home / PLAN, self.home / STATE, self.home / BIN, self.bin, *self.home.glob("hidden-*")):
            path.unlink(missing_ok=True)

    def text(self, name: str) -> str | None:
        """A text that was kept under this name."""
        path = self.home / name
        return path.read_text(encoding="utf8") if path.is_file() else None

    def keep_text(self, name: str, text: str) -> None:
        with _replacing(self.home / name) as path:
            path.write_text(text, encoding="utf8")

    def reached(self) -> int:
        """The number that `keep_state` was last given, -1 if it never was, or if a power cut has lost it."""
        told = self._state()
        return -1 if told is None else int(told["number"])

    def state(self) -> dict[str, Any] | None:
        """What `keep_state` was last given, its arrays as lists of arrays; None as for `reached`."""
        told = self._state()
        if told is None:
            return None
        with (self.home / told["file"]).open("rb") as file:
            arrays = {
                name: [np.fromfile(file, "<f4", int(np.prod(shape))).reshape(shape) for shape in shapes]
                for name, shapes in told["shapes"].items()
            }
        return {**told["values"], **arrays}

    def _state(self) -> dict[str, Any] | None:
        text = self.text(STATE)
        if text is None:
            return None
        told: dict[str, Any] = json.loads(text)
        path, total = self.home / told["file"], 0
        if path.is_file() and path.stat().st_size:
            total = journal.checksum(np.memmap(path, np.uint8, "r"))
        return told if total == told["checksum"] else None

    def keep_state(self, number: int, values: Mapping[str, Any], arrays: Mapping[str, Sequence[NDArray[np.float32]]]) -> None:
        """Where calibration stands, in place of what was kept before; a crash leaves one of the two."""
        name, digest = f"hidden-{number}.bin", xxhash.xxh3_64()
        with (self.home / name).open("wb") as file:
            for array in (array for one in arrays.values() for array in one):
                data = np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8).data
                # numpy's own `tofile` does not say that a disk is full.
                file.write(data)
                digest.update(data)
        shapes = {key: [list(array.shape) for array in one] for key, one in arrays.items()}
        _write_json(
            self.home / STATE, {"number": number, "file": name, "checksum": digest.intdigest(), "shapes": shapes, "values": dict(values)}
        )
        for path in self.home.glob("hidden-*"):
            if path.name != name:
                path.unlink()


def _write_json(path: Path, value: Any) -> None:
    with _replacing(path) as new:
        new.write_text(json.dumps(value), encoding="utf8")


class _replacing:
    """A file to write that takes the place of `path` at once."""

    def __init__(self, path: Path) -> None:
        self.path, self.new = path, path.with_name(path.name + ".new")

    def __enter__(self) -> Path:
        return self.new

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.new.replace(self.path)


def _short(value: Any) -> str:
    text = "not asked for" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 60 else text[:57] + "..."
