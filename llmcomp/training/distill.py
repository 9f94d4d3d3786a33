"""Distillation: a student learns the teacher's distribution of every token, by accelerate, in one process or several.

Not home-made: accumulation, processes, mixed precision, states and trackers are accelerate's, AdamW torch's, the curves of the rates transformers'.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    broadcast_object_list,
    set_seed,
)
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from llmcomp.errors import OptionError, TrainingError
from llmcomp.training import logits, state
from llmcomp.training.batches import MicroBatches, Rows, Shares, as_it_is, share_out
from llmcomp.training.divergence import Targets, summed_divergence
from llmcomp.training.processes import join
from llmcomp.training.quantized import quantized_weights, recomputing
from llmcomp.training.schedule import Budget, ClockBudget, StepBudget, Stopwatch, curve
from llmcomp.training.settings import Settings
from llmcomp.training.state import Position
from llmcomp.training.teacher import TeacherCache, digest
from llmcomp.training.tracker import NAME as LOG
from llmcomp.training.tracker import JsonLines, cut_log

Tell = Callable[[int, int, float, float, float], None]
"""(step, steps there will be, loss of the step, last held-out KL, seconds left), after each step, in the first process."""


@dataclass(frozen=True)
class Result:
    """What came of a run; KLs in nats a token of the held-out rows."""

    steps: int
    best_step: int
    best_kl: float
    first_kl: float
    stopped: str
    """"budget" or "patience"."""
    seconds: float

    @property
    def improved(self) -> bool:
        """Some step beat the student as it came; otherwise that is what is kept."""
        return self.best_step > 0

    def __str__(self) -> str:
        if not self.improved:
            return f"no step improved on the held-out KL of the start, {self.first_kl:.4g} nats a token: the start is kept"
        return f"held-out KL {self.first_kl:.4g} -> {self.best_kl:.4g} nats a token at step {self.best_step} of {self.steps}"


class Distiller(torch.nn.Module):  # type: ignore[misc]
    """The student with its loss: one module, so that several processes and mixed precision wrap the head's products too."""

    def __init__(self, student: Any, reading: logits.Reading) -> None:
        super().__init__()
        self.student, self.reading = student, reading

    def forward(self, ids: torch.Tensor, log_p: torch.Tensor, kept: torch.Tensor, log_tail: torch.Tensor) -> torch.Tensor:
        """Sum of the KLs of all tokens of ids [rows, length]; the teacher's arrays are [rows x length, k], likewise and [rows x length]."""
        hidden = logits.hidden_states(self.student, self.reading, ids).flatten(0, 1)
        weight, bias = logits.head_of(self.student, self.reading)
        return summed_divergence(hidden, weight, bias, Targets(log_p, kept, log_tail), self.reading)


def train(
    student: Any,
    groups: Callable[[str], str],
    rows: NDArray[np.integer[Any]],
    held_out_rows: NDArray[np.integer[Any]],
    cache: TeacherCache,
    settings: Settings,
    folder: Path,
    tell: Tell | None = None,
    resume: bool = False,
) -> Result:
    """Train the parameters of `student` that have requires_grad; on return, or on an error in a step, it has their best values, which lie in folder/best too.

    `groups` names the group, a key of `settings.learning_rates`, of a parameter's name. `cache` holds the teacher's answers to `rows`, then to
    `held_out_rows`. With `resume` a run that was killed goes on from its last state, or begins if it has none. With a budget of steps or tokens its trainable
    parameters end as those of an undisturbed one, to the bit; a budget of seconds makes rates follow the clock, and cannot keep that. The generators of
    random numbers of the process are seeded.

    Raises:
        OptionError: no rows, rows in both sets, a student of another vocabulary, nothing to train, a trainable parameter that is not f32, a group
            without a rate, tensorboard missing.
        OutputError: the cache is of other rows; the folder holds a run that is not to be resumed.
        TrainingError: a run that is resumed with other settings, rows, teacher or processes; a loss or a gradient that is no number.
    """
    parameters = state.trainable(student)
    _check(rows, held_out_rows, parameters, settings)
    optimizer = _optimizer(parameters, groups, settings)
    columns = logits.vocabulary_of(student)
    if settings.gradient_checkpointing and not getattr(student, "supports_gradient_checkpointing", False):
        raise OptionError(
            "gradient_checkpointing", f"transformers has none for {type(student).__name__}", "Leave it out, with fewer rows at once"
        )
    if columns != cache.vocabulary:
        raise OptionError("the student", f"the student has {columns} tokens, the teacher {cache.vocabulary}", "Give both one vocabulary")
    cache.check(np.concatenate([rows, held_out_rows]))
    with _training(student, settings.gradient_checkpointing):
        run = _Run(student, parameters, optimizer, rows, held_out_rows, cache, settings, folder, resume)
        try:
            return run.go(tell)
        finally:
            run.close()


@contextmanager
def _training(student: Any, checkpointing: bool) -> Iterator[None]:
    """The student in training mode; it is left as it was."""
    was, checkpoints = student.training, getattr(student, "is_gradient_checkpointing", False)
    student.train()
    rounded = [module for _, module, _ in quantized_weights(student)]
    if checkpointing and not checkpoints:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        with recomputing(rounded):
            yield
    finally:
        if checkpointing and not checkpoints:
            student.gradient_checkpointing_disable()
        student.train(was)


def _check(rows: NDArray[Any], held_out: NDArray[Any], parameters: dict[str, torch.nn.Parameter], settings: Settings) -> None:
    for name, given in (("training rows", rows), ("held-out rows", held_out)):
        if given.ndim != 2 or not given.size:
            raise OptionError(name, f"they have the shape {given.shape}", "Give at least one row of at least one token")
    if rows.shape[1] != held_out.shape[1]:
        raise OptionError(
            "held-out rows", f"they have {held_out.shape[1]} tokens, the training rows {rows.shape[1]}", "Cut both to one length"
        )
    both = {row.tobytes() for row in rows.astype(np.int64)} & {row.tobytes() for row in held_out.astype(np.int64)}
    if both:
        raise OptionError("held-out rows", f"{len(both)} of them are training rows too", "Leave them out of one of the two")
    if not parameters:
        raise OptionError("the student", "no parameter of it has requires_grad", "Mark what is to be trained")
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise OptionError(f"parameter {name}", f"it is {p.dtype}, in which small steps vanish", "Make trainable parameters f32")
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise OptionError("tensorboard", "the package `tensorboard` is not installed", "Install it: pip install tensorboard")


def _optimizer(parameters: dict[str, torch.nn.Parameter], groups: Callable[[str], str], settings: Settings) -> torch.optim.Optimizer:
    members: dict[str, list[torch.nn.Parameter]] = {}
    for name, p in parameters.items():
        group = groups(name)
        if group not in settings.learning_rates:
            raise OptionError(f"parameter {name}", f"its group {group} has no learning rate", f"Add learning_rates.{group} to the settings")
        members.setdefault(group, []).append(p)
    return torch.optim.AdamW(
        [
            {"params": of_it, "lr": settings.learning_rates[group], "weight_decay": settings.weight_decays.get(group, 0.0), "name": group}
            for group, of_it in members.items()
        ],
        betas=settings.betas,
    )


def _accelerator(settings: Settings, accumulated: int, folder: Path, trackers: list[Any]) -> Any:
    # accelerate keeps these in the class, and refuses a second run of a process that differs; the process group stays.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(
        mixed_precision="bf16" if settings.dtype == "bf16" else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulated, sync_with_dataloader=False),
        # Batches have their own lengths: none may be filled up or dropped.
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        step_scheduler_with_optimizer=False,
        project_dir=str(folder),
        log_with=trackers,
    )


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        student: Any,
        parameters: dict[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        rows: NDArray[Any],
        held_out: NDArray[Any],
        cache: TeacherCache,
        settings: Settings,
        folder: Path,
        resume: bool,
    ) -> None:
        self.parameters, self.settings, self.folder = parameters, settings, folder
        self.position = Position()
        self.shares: Shares = share_out(len(rows), join().num_processes, settings.batch_rows, settings.microbatch_rows)
        found = state.newest(folder) if resume else None
        start = int(found.name.removeprefix(state.STATE)) if found else 0
        trackers: list[Any] = [JsonLines(folder / LOG)]
        self.accelerator = _accelerator(settings, self.shares.accumulated, folder, trackers + ["tensorboard"] * settings.tensorboard)
        self._begin(rows, held_out, cache, resume, start if found else -1)
        self.accelerator.init_trackers("distillation")
        set_seed(settings.seed, device_specific=True)

        student.to(self.accelerator.device)
        self.step_tokens = self.shares.step_rows * rows.shape[1]
        self.budget = self._budget()
        factor = curve(settings.schedule, settings.warmup_share)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(self.budget.share(step)))
        distiller = Distiller(student, logits.read(student))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(distiller, optimizer, scheduler)
        self.batches = self._batches(Rows(rows, cache, 0), start)
        self.held_out = Rows(held_out, cache, len(rows))
        state.hook(self.accelerator, parameters, self.position)
        if found:
            self.accelerator.load_state(str(found))
            if settings.seconds is not None and state.best_of(folder)[1] < self.position.best_kl:
                # What came after the state does not come again in the same way.
                self.position.best_step, self.position.best_kl = state.best_of(folder)
        self.resumed = found is not None
        self.watch = Stopwatch(self.position.seconds)

    def _begin(self, rows: NDArray[Any], held_out: NDArray[Any], cache: TeacherCache, resume: bool, last: int) -> None:
        run = {
            "settings": self.settings.model_dump(mode="json"),
            "trainable": sum(p.numel() for p in self.parameters.values()),
            "rows": digest(rows),
            "held_out_rows": digest(held_out),
            "teacher": cache.description["identity"],
            "kept": cache.k,
            "processes": self.shares.processes,
        }
        # All processes read before the first one writes, so that all refuse or none.
        state.check_run(self.folder, run, resume)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            state.write_run(self.folder, run)
            cut_log(self.folder / LOG, last)

    def _budget(self) -> Budget:
        if self.settings.seconds is not None:
            return ClockBudget(self.settings.seconds)
        return StepBudget(self.settings.steps or -(-(self.settings.tokens or 0) // self.step_tokens))

    def _batches(self, rows: Rows, start: int) -> Iterator[list[torch.Tensor]]:
        # A generator of its own: starting to read must not draw from the one that dropout draws from.
        loader = DataLoader(
            rows, batch_sampler=MicroBatches(self.shares, self.settings.seed, start), collate_fn=as_it_is, generator=torch.Generator()
        )
        return iter(self.accelerator.prepare_data_loader(loader))

    def go(self, tell: Tell | None) -> Result:
        position = self.position
        try:
            if not self.resumed:
                self._evaluate()
            if isinstance(self.budget, ClockBudget):
                self.budget.reserve = self._agreed(position.evaluation_seconds)
            self._tick()
            while not position.stopped:
                if self.budget.ended(position.step):
                    position.stopped = "budget"
                elif self.settings.patience is not None and position.stale >= self.settings.patience:
                    position.stopped = "patience"
                else:
                    self._step(tell)
                if position.stopped:
                    self._finish()
        finally:
            self._restore()
        return Result(position.step, position.best_step, position.best_kl, position.first_kl, position.stopped, position.seconds)

    def _step(self, tell: Tell | None) -> None:
        position, accelerator, settings = self.position, self.accelerator, self.settings
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        norm = torch.zeros((), device=accelerator.device)
        loss = math.nan
        for _ in range(self.shares.accumulated):
            batch = next(self.batches)
            with accelerator.accumulate(self.model):
                summed = self.model(*batch)
                total += summed.detach().double()
                # accelerate divides by the microbatches, and torch by the processes; the mean is over the tokens of all of them.
                accelerator.backward(summed * (self.shares.accumulated * self.shares.processes / self.step_tokens))
                if accelerator.sync_gradients:
                    loss = float(accelerator.reduce(total, "sum")) / self.step_tokens
                    norm = accelerator.clip_grad_norm_(list(self.parameters.values()), settings.clip_norm or math.inf)
                    self._check_finite(loss, float(norm))
                    rates = {f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups}
                self.optimizer.step()
                if accelerator.sync_gradients:
                    position.step += 1
                    self._tick()
                    self.scheduler.step()
                self.optimizer.zero_grad()
        accelerator.log(
            {
                "tokens": position.step * self.step_tokens,
                "loss": loss,
                **rates,
                "norm": float(norm),
                "seconds": round(position.seconds, 3),
            },
            step=position.step,
        )
        if position.step % settings.eval_every == 0:
            self._evaluate()
        if settings.save_every is not None and position.step % settings.save_every == 0:
            state.save_state(accelerator, self.folder, position.step)
        if tell is not None and accelerator.is_main_process:
            steps = self.budget.total(position.step)
            left = (
                max(0.0, settings.seconds - self.watch.seconds)
                if settings.seconds
                else position.seconds / position.step * (steps - position.step)
            )
            tell(position.step, steps, loss, position.kl, left)

    def _check_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradients is {norm}"
        raise TrainingError(
            f"distillation, step {self.position.step + 1}",
            what,
            "Lower the learning rates, or clip gradients harder; the best state so far is kept",
        )

    def _tick(self) -> None:
        """What the clock of the first process says, to all of them."""
        self.position.seconds = self._agreed(self.watch.seconds)
        self.budget.tick(self.position.step, self.position.seconds)

    def _agreed(self, value: float) -> float:
        return float(broadcast_object_list([value])[0])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _evaluate(self) -> None:
        """Held-out KL; the trainable tensors are kept if it is the lowest so far."""
        began, position = self.watch.seconds, self.position
        # Processes have different numbers of batches here, and the wrapped one would wait for the others in each.
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        mine = range(self.accelerator.process_index, len(self.held_out), self.accelerator.num_processes)
        size, device = self.settings.microbatch_rows, self.accelerator.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(mine), size):
            batch = self.held_out.__getitems__(list(mine[start : start + size]))
            total += model(*(t.to(device) for t in batch)).double()
        model.train()
        position.kl = float(self.accelerator.reduce(total, "sum")) / self.held_out.rows.size
        if position.step == 0:
            position.first_kl = position.kl
        if not math.isfinite(position.kl):
            remedy = (
                "Lower the learning rates; the best state so far is kept" if position.step else "Give a student whose weights are numbers"
            )
            raise TrainingError(f"distillation, held-out rows at step {position.step}", f"the KL is {position.kl}", remedy)
        if position.kl < position.best_kl:
            position.best_kl, position.best_step, position.stale = position.kl, position.step, 0
            if self.accelerator.is_main_process:
                state.save_tensors(self.folder / state.BEST / state.TENSORS, self.parameters, position)
        else:
            position.stale += 1
        self.accelerator.log({"kl": position.kl}, step=position.step)
        position.evaluation_seconds = self.watch.seconds - began

    def _finish(self) -> None:
        """The last evaluation, unless this step had one, and the state, which a second resumption finds finished."""
        if self.position.step % self.settings.eval_every:
            self._evaluate()
        self.position.seconds = self._agreed(self.watch.seconds)
        if self.settings.save_every is not None:
            state.save_state(self.accelerator, self.folder, self.position.step)
        # The first process has written the best tensors, which all of them read.
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        path = self.folder / state.BEST / state.TENSORS
        if path.exists():
            state.load_tensors(path, self.parameters)

    def close(self) -> None:
        # Not accelerate's `end_training`, which parts the processes: the caller may have more for them to do.
        for tracker in self.accelerator.trackers:
            tracker.finish()
