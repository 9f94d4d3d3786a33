"""The loop of training: a student learns an objective, such as the teacher's distribution of every token, by accelerate, in one process or several.

Not home-made: accumulation, processes, mixed precision, states and trackers are accelerate's, AdamW torch's, the curves of the rates transformers'.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    broadcast_object_list,
    set_seed,
)
from torch.utils.data import DataLoader

from llmcomp.errors import OptionError, TrainingError
from llmcomp.training import logits, state
from llmcomp.training.batches import MicroBatches, Shares, as_it_is, share_out
from llmcomp.training.elastic import RankSearch
from llmcomp.training.objectives import Objective
from llmcomp.training.processes import join
from llmcomp.training.quantized import quantized_weights, recomputing
from llmcomp.training.schedule import Budget, ClockBudget, StepBudget, Stopwatch, curve
from llmcomp.training.settings import Settings
from llmcomp.training.state import Position
from llmcomp.training.tracker import NAME as LOG
from llmcomp.training.tracker import JsonLines, cut_log

Tell = Callable[[int, int, float, float, float], None]
"""(step, steps there will be, loss of the step, last held-out loss, seconds left), after each step, in the first process."""


WORDS = {"kl": "KL", "cross_entropy": "cross-entropy"}
SEARCH_SECONDS = 0.2
"""Of a budget of seconds, at most, for the search of ranks."""


@dataclass(frozen=True)
class Result:
    """What came of a run; losses in nats a token of the held-out rows."""

    steps: int
    best_step: int
    best_loss: float
    first_loss: float
    stopped: str
    """"budget" or "patience"."""
    seconds: float
    measure: str = "kl"
    """Which loss: kl or cross_entropy."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Module -> leading ranks of its adapter that the best state uses, where they were searched for."""

    @property
    def improved(self) -> bool:
        """Some step beat the student as it came; otherwise that is what is kept."""
        return self.best_step > 0

    def __str__(self) -> str:
        what = f"held-out {WORDS[self.measure]}"
        if not self.improved:
            return f"no step improved on the {what} of the start, {self.first_loss:.4g} nats a token: the start is kept"
        return f"{what} {self.first_loss:.4g} -> {self.best_loss:.4g} nats a token at step {self.best_step} of {self.steps}"


class Distiller(torch.nn.Module):  # type: ignore[misc]
    """The student with its loss: one module, so that several processes and mixed precision wrap the head's products too."""

    def __init__(self, student: Any, objective: Objective) -> None:
        super().__init__()
        self.student, self.objective, self.reading = student, objective, logits.read(student)

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """Sum of the losses of all tokens that count."""
        return self.objective.loss(self.student, self.reading, list(batch))


def train(
    student: Any,
    groups: Callable[[str], str],
    objective: Objective,
    settings: Settings,
    folder: Path,
    tell: Tell | None = None,
    resume: bool = False,
) -> Result:
    """Train the parameters of `student` that have requires_grad; on return, or on an error in a step, it has their best values, which lie in folder/best too.

    `groups` names the group, a key of `settings.learning_rates`, of a parameter's name. With `settings.elastic` the ranks of adapters are drawn in every
    step until they are searched for; on return those of the best values are in use (`elastic.cut` leaves no others). With `resume` a run that was killed
    goes on from its last state, or begins if it has none. With a budget of steps or tokens its trainable parameters end as those of an undisturbed one,
    to the bit; a budget of seconds makes rates follow the clock, and cannot keep that. The generators of random numbers of the process are seeded.

    Raises:
        OptionError: a student that cannot learn the objective, nothing to train, a trainable parameter that is not f32, a group without a rate, ranks that
            its adapters do not have, tensorboard missing.
        OutputError: a teacher's cache is of other rows; the folder holds a run that is not to be resumed.
        TrainingError: a run that is resumed with other settings, rows, teacher or processes; a loss or a gradient that is no number.
    """
    parameters = state.trainable(student)
    _check(parameters, settings)
    optimizer = _optimizer(parameters, groups, settings)
    if settings.gradient_checkpointing and not getattr(student, "supports_gradient_checkpointing", False):
        raise OptionError(
            "gradient_checkpointing", f"transformers has none for {type(student).__name__}", "Leave it out, with fewer rows at once"
        )
    objective.check(student)
    search = None if settings.elastic is None else RankSearch(student, settings.elastic, settings.seed)
    with _training(student, settings.gradient_checkpointing):
        run = _Run(student, parameters, optimizer, objective, settings, search, folder, resume)
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


def _check(parameters: dict[str, torch.nn.Parameter], settings: Settings) -> None:
    if not parameters:
        raise OptionError("the student", "no parameter of it has requires_grad", "Mark what is to be trained")
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise OptionError(f"parameter {name}", f"it is {p.dtype}, in which small steps vanish", "Make trainable parameters f32")
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise OptionError("tensorboard", "the package `tensorboard` is not installed", "Install it: pip install 'llmcomp[tensorboard]'")


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
        objective: Objective,
        settings: Settings,
        search: RankSearch | None,
        folder: Path,
        resume: bool,
    ) -> None:
        self.parameters, self.objective, self.settings, self.folder = parameters, objective, settings, folder
        self.search, self.rows, self.held_out = search, objective.rows, objective.held_out
        self.position = Position()
        self.shares: Shares = share_out(len(self.rows), join().num_processes, settings.batch_rows, settings.microbatch_rows)
        found = state.newest(folder) if resume else None
        start = int(found.name.removeprefix(state.STATE)) if found else 0
        trackers: list[Any] = [JsonLines(folder / LOG)]
        self.accelerator = _accelerator(settings, self.shares.accumulated, folder, trackers + ["tensorboard"] * settings.tensorboard)
        self._begin(resume, start if found else -1)
        self.accelerator.init_trackers("distillation")
        set_seed(settings.seed, device_specific=True)

        student.to(self.accelerator.device)
        self.budget = self._budget()
        factor = curve(settings.schedule, settings.warmup_share)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(self.budget.share(step)))
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(Distiller(student, objective), optimizer, scheduler)
        self.micro = MicroBatches(self.shares, settings.seed, start)
        self.batches = self._batches()
        state.hook(self.accelerator, parameters, self.position)
        if found:
            self.accelerator.load_state(str(found))
            if settings.seconds is not None and state.best_of(folder)[1] < self.position.best_loss:
                # What came after the state does not come again in the same way.
                self.position.best_step, self.position.best_loss, _ = state.best_of(folder)
        self.resumed = found is not None
        self.watch = Stopwatch(self.position.seconds)

    def _begin(self, resume: bool, last: int) -> None:
        run = {
            "settings": self.settings.model_dump(mode="json"),
            "trainable": sum(p.numel() for p in self.parameters.values()),
            "objective": self.objective.measure,
            **self.objective.identity(),
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
        counts = self.rows.counts
        # Rows of a step have the tokens of as many rows of all, on the mean.
        return StepBudget(self.settings.steps or -(-(self.settings.tokens or 0) * len(counts) // int(self.shares.step_rows * counts.sum())))

    def _batches(self) -> Iterator[list[torch.Tensor]]:
        # A generator of its own: starting to read must not draw from the one that dropout draws from.
        loader = DataLoader(self.rows, batch_sampler=self.micro, collate_fn=as_it_is, generator=torch.Generator())
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
            ranks = self._restore()
        return Result(
            position.step,
            position.best_step,
            position.best_loss,
            position.first_loss,
            position.stopped,
            position.seconds,
            self.objective.measure,
            ranks,
        )

    def _step(self, tell: Tell | None) -> None:
        position, accelerator, settings = self.position, self.accelerator, self.settings
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        norm = torch.zeros((), device=accelerator.device)
        loss, tokens = math.nan, int(self.rows.counts[self.micro.rows_of(position.step)].sum())
        if self.search is not None:
            self.search.use(position.ranks or self.search.draw(position.step))
        for _ in range(self.shares.accumulated):
            batch = next(self.batches)
            with accelerator.accumulate(self.model):
                summed = self.model(*batch)
                total += summed.detach().double()
                # accelerate divides by the microbatches, and torch by the processes; the mean is over the tokens of all of them.
                accelerator.backward(summed * (self.shares.accumulated * self.shares.processes / tokens))
                if accelerator.sync_gradients:
                    loss = float(accelerator.reduce(total, "sum")) / tokens
                    norm = accelerator.clip_grad_norm_(list(self.parameters.values()), settings.clip_norm or math.inf)
                    self._check_finite(loss, float(norm))
                    rates = {f"lr/{group['name']}": group["lr"] for group in self.optimizer.param_groups}
                self.optimizer.step()
                if accelerator.sync_gradients:
                    position.step += 1
                    position.tokens += tokens
                    self._tick()
                    self.scheduler.step()
                self.optimizer.zero_grad()
        accelerator.log(
            {
                "tokens": position.tokens,
                "loss": loss,
                **rates,
                "norm": float(norm),
                "seconds": round(position.seconds, 3),
            },
            step=position.step,
        )
        if position.step % settings.eval_every == 0:
            self._evaluate()
        if self.search is not None and self._search_is_due(self.search):
            self._find_ranks(self.search)
        if settings.save_every is not None and position.step % settings.save_every == 0:
            state.save_state(accelerator, self.folder, position.step)
        if tell is not None and accelerator.is_main_process:
            steps = self.budget.total(position.step)
            left = (
                max(0.0, settings.seconds - self.watch.seconds)
                if settings.seconds
                else position.seconds / position.step * (steps - position.step)
            )
            tell(position.step, steps, loss, position.loss, left)

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
    def _judge(self) -> float:
        """Mean loss of the held-out tokens, of the student as it is."""
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
        return float(self.accelerator.reduce(total, "sum")) / int(self.held_out.counts.sum())

    def _evaluate(self) -> None:
        """Held-out loss, with the ranks that were found, else where the search will begin."""
        began, position = self.watch.seconds, self.position
        if self.search is not None:
            self.search.use(position.ranks or self.search.start)
        self._take(self._judge())
        self.accelerator.log({self.objective.measure: position.loss}, step=position.step)
        position.evaluation_seconds = self.watch.seconds - began

    def _take(self, loss: float) -> None:
        """A held-out loss; the trainable tensors are kept if it is the lowest so far."""
        position = self.position
        position.loss = loss
        if position.step == 0:
            position.first_loss = loss
        if not math.isfinite(loss):
            remedy = (
                "Lower the learning rates; the best state so far is kept" if position.step else "Give a student whose weights are numbers"
            )
            what = f"the {WORDS[self.objective.measure]} is {loss}"
            raise TrainingError(f"distillation, held-out rows at step {position.step}", what, remedy)
        if loss < position.best_loss:
            position.best_loss, position.best_step, position.stale = loss, position.step, 0
            if self.accelerator.is_main_process:
                state.save_tensors(self.folder / state.BEST / state.TENSORS, self.parameters, position)
        else:
            position.stale += 1

    def _search_is_due(self, search: RankSearch) -> bool:
        position, patience = self.position, self.settings.patience
        if position.ranks:
            return False
        stale = patience is not None and position.stale >= patience
        return stale or self.budget.share(position.step) >= search.share or self.budget.ended(position.step)

    def _find_ranks(self, search: RankSearch) -> None:
        """Once in a run; what is found is trained on, with new patience."""
        position, evaluations = self.position, None
        if self.settings.seconds is not None:
            evaluations = int(SEARCH_SECONDS * self.settings.seconds / max(self._agreed(position.evaluation_seconds), 1e-9))
        # A search goes by which loss is lower: the last bit must be the same in all processes.
        found = search.find(lambda: self._agreed(self._judge()), evaluations)
        position.ranks = list(found.config)
        search.use(found.config)
        self._take(found.loss)
        position.stale = 0
        told = {"search": found.evaluations, "start": found.start_loss, "found": found.loss}
        self.accelerator.log(told, step=position.step)
        self._tick()

    def _finish(self) -> None:
        """The last evaluation, unless this step had one, and the state, which a second resumption finds finished."""
        if self.position.step % self.settings.eval_every:
            self._evaluate()
        self.position.seconds = self._agreed(self.watch.seconds)
        if self.settings.save_every is not None:
            state.save_state(self.accelerator, self.folder, self.position.step)
        # The first process has written the best tensors, which all of them read.
        self.accelerator.wait_for_everyone()

    def _restore(self) -> dict[str, int]:
        """The best values and their ranks."""
        path = self.folder / state.BEST / state.TENSORS
        if path.exists():
            state.load_tensors(path, self.parameters)
            if self.search is not None:
                self.search.use(state.best_of(self.folder)[2] or self.search.start)
        return {} if self.search is None else self.search.in_use()

    def close(self) -> None:
        # Not accelerate's `end_training`, which parts the processes: the caller may have more for them to do.
        for tracker in self.accelerator.trackers:
            tracker.finish()
