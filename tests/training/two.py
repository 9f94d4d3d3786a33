"""A run for `torchrun -m tests.training.two FOLDER BATCH`, and the same for one process."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import PartialState

from llmcomp.training.distill import train
from tests.training.models import cached, one_group, rows, settings, student


def main(folder: Path, batch: int) -> None:
    r, h = rows(11), rows(3, 1)
    with PartialState(cpu=True).main_process_first():
        cache = cached(folder / "cache", r, h)
    model = student()
    train(model, one_group, r, h, cache, settings(steps=8, eval_every=3, save_every=4, batch_rows=batch), folder / "run")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
