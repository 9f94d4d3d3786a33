"""The log of a run, one JSON line a step and one an evaluation, as a tracker of accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process

NAME = "log.jsonl"


class JsonLines(GeneralTracker):  # type: ignore[misc]
    """Appends to a file; lines of steps behind `keep`, which a resumed run takes again, are dropped first."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path, keep: int) -> None:
        super().__init__()
        self.path, self.keep = path, keep

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        lines = [json.dumps(line) + "\n" for line in read_log(self.path) if line["step"] <= self.keep] if self.path.exists() else []
        partial = self.path.with_name(NAME + ".partial")
        partial.write_text("".join(lines), encoding="utf8")
        partial.replace(self.path)

    @on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a", encoding="utf8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a log; a last one that a crash cut short is not one."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines(keepends=True) if line.endswith("\n")]
