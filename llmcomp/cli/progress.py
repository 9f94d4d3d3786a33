"""How a run tells what it does: a bar with ETA on a terminal, plain lines when piped, warnings only when quiet; JSON lines beside any."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from llmcomp.errors import OptionError
from llmcomp.progress import Progress

LINE_SECONDS = 5.0
"""Plain lines come at most this often."""


class Quiet(Progress):
    """Warnings on stderr."""

    def warn(self, text: str) -> None:
        print(f"llmcomp: warning: {text}", file=sys.stderr, flush=True)


class Lines(Quiet):
    """Plain lines: stages, notes, and a percentage every few seconds."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.total = self.done = 0
        self.began = self.told = 0.0

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def stage(self, name: str) -> None:
        self._say(f"{name} ...")

    def note(self, text: str) -> None:
        self._say(f"  {text}")

    def start(self, total: int, what: str) -> None:
        self.total, self.done = total, 0
        self.began = self.told = time.monotonic()

    def advance(self, amount: int) -> None:
        self.done += amount
        now = time.monotonic()
        if now - self.told >= LINE_SECONDS and self.done < self.total:
            self.told = now
            left = (now - self.began) * (self.total - self.done) / self.done
            self._say(f"  {100 * self.done / self.total:.0f} %, about {left:.0f} s left")


class Bar(Quiet):
    """rich's bar, with the layer that was finished last."""

    def __init__(self, stack: ExitStack) -> None:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.TextColumn("{task.percentage:>3.0f}%"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
        )
        self.console = Console(highlight=False)
        self.progress = stack.enter_context(bars.Progress(*columns, console=self.console, transient=True))
        self.task = self.progress.add_task("starting", total=None)

    def stage(self, name: str) -> None:
        self.progress.reset(self.task, description=name, total=None)

    def start(self, total: int, what: str) -> None:
        self.progress.update(self.task, total=total, completed=0)

    def advance(self, amount: int) -> None:
        self.progress.update(self.task, advance=amount)

    def layer(self, name: str, format: str, seconds: float, **details: Any) -> None:
        self.progress.update(self.task, description=f"compress {name[-40:]}")

    def note(self, text: str) -> None:
        self.console.print(f"  {text}", soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True, markup=False)


class Log(Progress):
    """One JSON object per event."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.total = self.done = 0

    def _event(self, event: str, **fields: Any) -> None:
        print(json.dumps({"time": round(time.time(), 3), "event": event, **fields}), file=self.file, flush=True)

    def stage(self, name: str) -> None:
        self._event("stage", name=name)

    def start(self, total: int, what: str) -> None:
        self.total, self.done = total, 0
        self._event("start", total=total, what=what)

    def advance(self, amount: int) -> None:
        self.done += amount

    def layer(self, name: str, format: str, seconds: float, **details: Any) -> None:
        self._event("layer", name=name, format=format, seconds=round(seconds, 4), done=self.done, total=self.total, **details)

    def note(self, text: str) -> None:
        self._event("note", text=text)

    def warn(self, text: str) -> None:
        self._event("warning", text=text)

    def finish(self) -> None:
        self._event("finish")


class Both(Progress):
    """Tells two faces everything."""

    def __init__(self, *faces: Progress) -> None:
        for name in ("stage", "start", "advance", "layer", "note", "warn", "finish"):
            setattr(self, name, self._to_all([getattr(face, name) for face in faces]))

    @staticmethod
    def _to_all(methods: list[Any]) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            for method in methods:
                method(*arguments, **named)

        return call


@contextmanager
def make_progress(quiet: bool, json_log: Path | None, stream: IO[str] | None = None) -> Iterator[Progress]:
    """The face for this run; `stream` takes plain lines (default: standard output).

    Raises:
        OptionError: the log file cannot be written.
    """
    with ExitStack() as stack:
        out = stream or sys.stdout
        face: Progress = Quiet() if quiet else Bar(stack) if out is sys.stdout and out.isatty() else Lines(out)
        if json_log is not None:
            try:
                file = stack.enter_context(json_log.open("w", encoding="utf8"))
            except OSError as error:
                raise OptionError(f"--json-log {json_log}", f"it cannot be written ({error.strerror})", "Choose another file") from None
            face = Both(face, Log(file))
        yield face
