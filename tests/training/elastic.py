"""A student whose layers have very different damage, with adapters of elastic rank: a teacher that was fine-tuned in three layers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmcomp import formats
from llmcomp.training.distill import Result, train
from llmcomp.training.objectives import Distillation
from llmcomp.training.quantized import Start, quantize_weight
from llmcomp.training.settings import Settings
from llmcomp.training.teacher import write_cache
from tests.reference.divergence import full
from tests.training.models import VOCABULARY, cached, llama, one_group, rows

RANKS = (8, 4, 2, 1)
KINDS = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that matter: the queries and keys of random weights do next to nothing."""


def layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.model.named_modules() if isinstance(module, torch.nn.Linear)]


def teacher(seed: int) -> Any:
    """Three layers have changed by as much as their weights, in eight directions."""
    model, generator = llama(), torch.Generator().manual_seed(100 + seed)
    able = [module for name, module in layers(model) if name.endswith(KINDS)]
    with torch.no_grad():
        for i in torch.randperm(len(able), generator=generator)[:3].tolist():
            weight = able[i].weight
            rows, columns = weight.shape
            change = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator)
            weight.add_(change * (weight.std() / change.std()))
    return model


def student(rank: int, seed: int = 0) -> Any:
    """The model before it was, in 8 bits; its adapters are trained."""
    model = llama()
    for number, (_, module) in enumerate(layers(model)):
        weight = module.weight.detach().numpy()
        quantize_weight([module], Start(formats.quantize(formats.get("int8_sym"), weight, -1)), rank, seed=100 * seed + number)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def learnt(folder: Path, seed: int) -> Distillation:
    r, h = rows(64, 10 + seed), rows(16, 1000 + seed)
    return Distillation(r, h, write_cache(folder / "cache", teacher(seed), np.concatenate([r, h]), "t", VOCABULARY))


def go(
    folder: Path, model: Any, objective: Any, seed: int, ranks: Sequence[int] = (), tell: Any = None, resume: bool = False, **more: Any
) -> Result:
    """With ranks they are searched for; settings of `elastic` begin with its name."""
    elastic = (
        {"ranks": ranks, **{k.removeprefix("elastic_"): more.pop(k) for k in list(more) if k.startswith("elastic_")}} if ranks else None
    )
    values = {"steps": 100, "batch_rows": 8, "microbatch_rows": 8, "eval_every": 10, "learning_rates": {"all": 3e-3}, **more}
    given = Settings.of({**values, "seed": seed, "elastic": elastic})
    return train(model, one_group, objective, given, folder / "run", tell, resume)


def kl(seed: int, model: Any) -> float:
    """To the teacher, of rows that nothing was trained on or chosen by, in float64."""
    ids = torch.from_numpy(rows(64, 2000 + seed))
    with torch.no_grad():
        p, q = (m(input_ids=ids).logits.flatten(0, 1).numpy() for m in (teacher(seed), model))
    return float(full(p, q).mean())


def searching(folder: Path, kill: int, resume: bool) -> None:
    """Work for `apart` that kills itself behind step `kill`, or not if it is 0: 14 steps, searched in the sixth, states every four."""

    def tell(step: int, *_: float) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    r, h = rows(12), rows(4, 1)
    objective = Distillation(r, h, cached(folder / "cache", r, h))
    more = {"steps": 14, "batch_rows": 4, "microbatch_rows": 2, "eval_every": 3, "save_every": 4}
    go(folder, student(RANKS[0]), objective, 0, RANKS, tell, resume, elastic_share=0.4, elastic_evaluations=20, **more)
