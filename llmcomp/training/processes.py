"""The processes of a run, as torchrun or `accelerate launch` started them."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from llmcomp.errors import TrainingError


def join() -> Any:
    """accelerate's `PartialState`. It joins processes without an accelerator only if it is told that they have none: each would otherwise
    take itself for the only one, and write what the others write.

    Raises:
        TrainingError: the program has made it before, in that way.
    """
    found = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if found.num_processes != started:
        reason = f"{started} processes were started, of which this one sees {found.num_processes}"
        raise TrainingError("distillation", reason, "Call llmcomp.training.processes.join() before anything else of accelerate")
    return found


def leave() -> None:
    """Part from the others, at the end of a program."""
    PartialState().destroy_process_group()
