"""A run of two processes, interrupted and resumed, and the same for one process, undisturbed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmcomp.training.distill import train
from llmcomp.training.objectives import Distillation
from llmcomp.training.processes import join, leave
from tests.training.models import cached, one_group, rows, settings, student

INTERRUPTED = 11
"""Forward passes, two a step: in the sixth, two behind the last state."""


class Interrupted(Exception):
    """As a machine is taken away."""


def main(folder: Path, batch: int, interrupted: bool) -> None:
    r, h = rows(11), rows(3, 1)
    with join().main_process_first():
        cache = cached(folder / "cache", r, h)
    given = (Distillation(r, h, cache), settings(steps=8, eval_every=3, save_every=4, batch_rows=batch), folder / "run")
    if interrupted:
        model, passes = student(), 0

        def count(module: Any, *_: Any) -> None:
            nonlocal passes
            passes += module.training
            if passes == INTERRUPTED:
                raise Interrupted

        model.model.register_forward_pre_hook(count)
        try:
            train(model, one_group, *given)
        except Interrupted:
            (folder / f"interrupted-{join().process_index}").touch()
    train(student(), one_group, *given, resume=interrupted)


def one_of_two(rank: int, port: int, folder: Path, batch: int) -> None:
    """In the environment that torchrun makes."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()}, CUDA_VISIBLE_DEVICES="")
    main(folder, batch, True)
    leave()
