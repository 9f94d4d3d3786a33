"""What the stages of one run share.

comes in: a Progress
goes out: what was told: stages with their seconds, warnings, which data was used
may import: calibration, progress
read first: Run
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from llmcomp.calibration import Samples
from llmcomp.progress import Progress


@dataclass
class Run:
    """How to tell, and how long each stage took."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    used: Samples | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def warn(self, text: str) -> None:
        if text in self.warnings:
            return
        self.warnings.append(text)
        self.progress.warn(text)

    def use(self, samples: Samples) -> None:
        """Tell once what text is looked at."""
        if samples is not self.used:
            self.progress.note(f"calibration data: {samples}")
            for text in samples.warnings:
                self.warn(text)
        self.used = samples
