"""What a run keeps on disk: the best trainable tensors, and the state that a killed run resumes from, by accelerate's `save_state`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llmcomp.errors import OutputError, TrainingError
from llmcomp.training.atomic import move, sync, sync_entry, write_text

BEST, TENSORS, RUN = "best", "trainable.safetensors", "run.json"
STATE = "state-"


@dataclass
class Position:
    """Where a run stands; accelerate saves and loads it with the rest."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    """Whose loss was taken."""
    loss: float = float("nan")
    """Of the last evaluation on held-out rows, nats a token."""
    first_loss: float = float("nan")
    """Before the first step."""
    best_loss: float = float("inf")
    best_step: int = 0
    stale: int = 0
    """Evaluations since the best one."""
    evaluation_seconds: float = 0.0
    """Of the last evaluation."""
    ranks: list[int] = field(default_factory=list)
    """Of each layer, once a search has found them."""
    stopped: str = ""
    """Why it ended, once it has: "budget" or "patience"."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def trainable(student: Any) -> dict[str, torch.nn.Parameter]:
    """Name -> parameter with requires_grad, a shared one once."""
    return {name: p for name, p in student.named_parameters() if p.requires_grad}


def save_tensors(path: Path, parameters: dict[str, torch.nn.Parameter], position: Position) -> None:
    """In one step: a reader finds the tensors of before or these."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    told = {"step": str(position.step), "loss": repr(position.loss), "ranks": json.dumps(position.ranks)}
    save_file({name: p.detach().cpu().contiguous() for name, p in parameters.items()}, partial, told)
    move(partial, path)


def load_tensors(path: Path, parameters: dict[str, torch.nn.Parameter]) -> None:
    """
    Raises:
        TrainingError: the file has other tensors than the student.
    """
    found = load_file(path)
    want, have = {n: tuple(p.shape) for n, p in parameters.items()}, {n: tuple(t.shape) for n, t in found.items()}
    if want != have:
        name = min(set(want.items()) ^ set(have.items()))[0]
        reason = f"{name} is {have.get(name, 'not in it')}, and {want.get(name, 'not trainable')} in the student"
        raise TrainingError(f"{path}", reason, "Give the student that the run began with, or another folder")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(found[name])


def best_of(folder: Path) -> tuple[int, float, list[int]]:
    """Step and held-out loss of the best tensors of a run, and the ranks that were searched for them, if they were."""
    with safe_open(folder / BEST / TENSORS, "pt") as file:
        told = file.metadata()
    return int(told["step"]), float(told["loss"]), json.loads(told["ranks"])


def newest(folder: Path) -> Path | None:
    """The state with the most steps; a folder that a crash left unfinished has another name."""
    found = [path for path in folder.glob(f"{STATE}*") if re.fullmatch(rf"{STATE}\d+", path.name)]
    return max(found, key=lambda path: int(path.name.removeprefix(STATE)), default=None)


def hook(accelerator: Any, parameters: dict[str, torch.nn.Parameter], position: Position) -> None:
    """`save_state` and `load_state` take the trainable tensors alone, and the position: the rest of a student never changes."""

    def before_save(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()
        if accelerator.is_main_process:
            save_tensors(Path(folder) / TENSORS, parameters, position)

    def before_load(models: list[Any], folder: str) -> None:
        models.clear()
        load_tensors(Path(folder) / TENSORS, parameters)

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
    accelerator.register_for_checkpointing(position)


def save_state(accelerator: Any, folder: Path, step: int) -> None:
    """The state of all processes as `state-STEP`, renamed to it when it is on disk; earlier ones go."""
    partial, final = folder / "state.partial", folder / f"{STATE}{step:08d}"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        sync(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        sync_entry(folder)
        for old in folder.glob(f"{STATE}*"):
            if old != final:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()


def check_run(folder: Path, run: dict[str, Any], resume: bool) -> None:
    """Compare what a run is with what is written of the one that began here.

    Raises:
        OutputError: there is one, and it is not to be resumed.
        TrainingError: it is resumed with something else.
    """
    path = folder / RUN
    if not path.exists():
        return
    if not resume:
        raise OutputError(f"{folder}", "a training run has begun here", "Resume it, or give another folder")
    before = _flat(json.loads(path.read_text(encoding="utf8")))
    now = _flat(run)
    for key in sorted(now.keys() | before.keys()):
        if now.get(key) != before.get(key):
            found = f"it began with {key} {before.get(key)}, and is to go on with {now.get(key)}"
            raise TrainingError(f"{folder}", found, "Give what it began with, or another folder")


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    """Settings by their names, so that a message names one."""
    return {**{key: value for key, value in run.items() if key != "settings"}, **run["settings"]}


def write_run(folder: Path, run: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RUN, json.dumps(run, indent=1))
