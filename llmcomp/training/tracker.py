"""The log of a run, one JSON line a step and one an evaluation, as a tracker of accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

from llmcomp.training.atomic import write_text

NAME = "log.jsonl"


class JsonLines(GeneralTracker):  # type: ignore[misc]
    """Appends to a file."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a", encoding="utf8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def cut_log(path: Path, last: int) -> None:
    """Drop the lines of steps behind `last`, which a resumed run takes again, and what a crash cut short."""
    if path.exists():
        write_text(path, "".join(json.dumps(line) + "\n" for line in read_log(path) if line["step"] <= last))


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; a last one that a crash cut short is not one."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines(keepends=True) if line.endswith("\n")]
