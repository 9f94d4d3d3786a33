"""A run of two processes, interrupted and resumed, and the same for one process, undisturbed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llmcomp.training.completions import Completions
from llmcomp.training.distill import train
from llmcomp.training.objectives import Completion, Distillation
from llmcomp.training.processes import join, leave
from tests.training.elastic import go
from tests.training.elastic import student as adapted
from tests.training.models import LENGTH, cached, one_group, pairs, rows, settings, student

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


def searched_task(folder: Path, batch: int) -> None:
    """Completions of different lengths, with ranks that are drawn, one of them 0, and searched for."""
    given = [Completions.of(pairs(count, seed), LENGTH) for count, seed in ((11, 0), (3, 1))]
    more = {"batch_rows": batch, "microbatch_rows": 2, "steps": 8, "eval_every": 4, "elastic_evaluations": 12, "elastic_share": 0.5}
    go(folder, adapted(4), Completion(*given), 0, (4, 1, 0), **more)


def one_of_two_searching(rank: int, port: int, folder: Path, batch: int) -> None:
    _as_torchrun(rank, port)
    searched_task(folder, batch)
    leave()


def one_of_two(rank: int, port: int, folder: Path, batch: int) -> None:
    _as_torchrun(rank, port)
    main(folder, batch, True)
    leave()


def _as_torchrun(rank: int, port: int) -> None:
    """In the environment that it makes."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()}, CUDA_VISIBLE_DEVICES="")
