"""A run in a process of its own: `python -m tests.training.killed FOLDER STEP RESUME JSON` is killed behind that step, or ends if it is 0.

JSON: changes of the settings. Dropout makes the state of the random numbers count."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from llmcomp.training.distill import train
from tests.training.models import cached, one_group, rows, settings, student


def main(folder: Path, kill: int, resume: bool, more: dict[str, object]) -> None:
    def tell(step: int, *_: float) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    r, h = rows(12), rows(4, 1)
    model = student(attention_dropout=0.1)
    train(model, one_group, r, h, cached(folder.parent / f"{folder.name}.cache", r, h), settings(**more), folder, tell, resume)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", json.loads(sys.argv[4]))
