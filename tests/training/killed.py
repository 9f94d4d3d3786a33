"""Work for `apart` that kills itself on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from llmcomp.training import state, teacher
from llmcomp.training.distill import train
from llmcomp.training.objectives import Distillation
from llmcomp.training.teacher import write_cache
from tests.training.models import cached, llama, one_group, rows, settings, student


def training(folder: Path, kill: int, resume: bool, more: dict[str, Any]) -> None:
    """Killed behind step `kill`, or not if it is 0, or, if it is below, in that state's saving. Dropout makes the state of the random numbers count."""

    def tell(step: int, *_: float) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    saved = 0

    def sync(path: Path) -> None:
        nonlocal saved
        saved += 1
        if saved == -kill:
            os.kill(os.getpid(), signal.SIGKILL)

    state.sync = sync
    r, h = rows(12), rows(4, 1)
    model = student(attention_dropout=0.1)
    learnt = Distillation(r, h, cached(folder.parent / f"{folder.name}.cache", r, h))
    train(model, one_group, learnt, settings(**more), folder, tell, resume)


def caching(folder: Path, kill: int) -> None:
    """Killed behind that many rows of six."""

    def tell(finished: int, total: int) -> None:
        if finished == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    teacher.KEEP_SECONDS = 0.0
    write_cache(folder, llama(), rows(6), "t", 8, 1, tell)
