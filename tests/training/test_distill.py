"""The loop: what it learns, when it ends, what it keeps, what it writes down and what it refuses."""

from __future__ import annotations

import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

from llmcomp.errors import OptionError, OutputError, TrainingError
from llmcomp.training import state
from llmcomp.training.batches import MicroBatches, share_out
from llmcomp.training.distill import Result, train
from llmcomp.training.objectives import Distillation
from llmcomp.training.settings import Settings
from llmcomp.training.tracker import read_log
from tests.reference.divergence import full
from tests.training.models import LENGTH, VOCABULARY, cached, llama, one_group, rows, settings, student

R, H = rows(12), rows(4, 1)


def go(folder: Path, model: Any, r: np.ndarray = R, h: np.ndarray = H, k: int = 16, tell: Any = None, **more: Any) -> Result:
    return train(
        model, one_group, Distillation(r, h, cached(folder / "cache", r, h, k=k)), settings(**{"steps": 10, **more}), folder / "run", tell
    )


def log(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "run" / "log.jsonl")


def kl(model: Any, r: np.ndarray) -> float:
    """Of all tokens, in float64."""
    ids = torch.from_numpy(r)
    with torch.no_grad():
        return float(full(llama()(input_ids=ids).logits.flatten(0, 1).numpy(), model(input_ids=ids).logits.flatten(0, 1).numpy()).mean())


def test_a_disturbed_student_comes_back(tmp_path: Path) -> None:
    model = student()
    first = kl(model, H)
    told: list[Any] = []
    result = go(tmp_path, model, k=VOCABULARY, steps=30, tell=lambda *x: told.append(x))
    # f16 log-probabilities of up to 20 nats.
    assert result.first_loss == pytest.approx(first, rel=1e-3)
    assert result.improved and result.best_loss < 0.4 * first
    assert kl(model, H) == pytest.approx(result.best_loss, rel=2e-3)
    best = load_file(tmp_path / "run" / "best" / state.TENSORS)
    assert all(best[name].equal(p) for name, p in model.named_parameters())
    assert state.best_of(tmp_path / "run") == (result.best_step, result.best_loss, [])
    assert [t[:2] for t in told] == [(step, 30) for step in range(1, 31)]
    assert told[-1][4] == 0 and told[0][4] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_one_step_is_that_of_torch(tmp_path: Path, tied: bool) -> None:
    """Mean over the tokens of microbatches, clipping and AdamW, written out; a tied matrix gets the gradients of both its uses."""
    model = student(tie_word_embeddings=tied)
    twin = {name: p.detach().clone() for name, p in model.named_parameters()}
    more = {"steps": 1, "batch_rows": 12, "microbatch_rows": 5, "warmup_share": 0.0, "weight_decays": {"all": 0.1}}
    go(tmp_path, model, k=VOCABULARY, **more)
    other = student(tie_word_embeddings=tied)
    ids = torch.from_numpy(R)
    with torch.no_grad():
        p = llama()(input_ids=ids).logits.log_softmax(-1)
    q = other(input_ids=ids).logits.log_softmax(-1)
    loss = (p.exp() * (p - q)).sum(-1).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.AdamW(other.parameters(), lr=3e-3, betas=(0.9, 0.999), weight_decay=0.1).step()
    line = next(line for line in log(tmp_path) if "loss" in line)
    assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    assert line["norm"] == pytest.approx(float(norm), rel=1e-3)
    # Adam's first step is the sign of the gradient wherever it is not almost zero.
    moved = torch.cat([(p - twin[name]).flatten() for name, p in model.named_parameters()])
    expected = torch.cat([(p.detach() - twin[name]).flatten() for name, p in other.named_parameters()])
    assert float(((moved - expected).abs() < 1e-5).float().mean()) > 0.98


def test_what_is_frozen_stays_and_what_is_not_is_all_that_is_kept(tmp_path: Path) -> None:
    model = student(trainable="q_proj")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    go(tmp_path, model, save_every=5)
    changed = {name for name, p in model.named_parameters() if not p.equal(before[name])}
    assert changed == set(load_file(tmp_path / "run" / "best" / state.TENSORS)) == {n for n in before if "q_proj" in n}
    assert set(load_file(tmp_path / "run" / "state-00000010" / state.TENSORS)) == changed


def test_groups_have_their_rates(tmp_path: Path) -> None:
    model = student()
    given = settings(steps=2, learning_rates={"heads": 1e-3, "rest": 1e-4}, warmup_share=0.0, schedule="linear")
    train(
        model,
        lambda name: "heads" if "lm_head" in name else "rest",
        Distillation(R, H, cached(tmp_path / "c", R, H)),
        given,
        tmp_path / "run",
    )
    lines = [line for line in log(tmp_path) if "loss" in line]
    assert [(line["lr/heads"], line["lr/rest"]) for line in lines] == [(1e-3, 1e-4), (5e-4, pytest.approx(5e-5))]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant_with_warmup"])
def test_rates_follow_the_librarys_curve(tmp_path: Path, name: str) -> None:
    go(tmp_path, student(), steps=10, schedule=name, warmup_share=0.2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=10)
    expected = []
    for _ in range(10):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert [line["lr/all"] for line in log(tmp_path) if "loss" in line] == pytest.approx(expected)


def test_the_log_counts_tokens_and_evaluations(tmp_path: Path) -> None:
    go(tmp_path, student(), steps=7, eval_every=3)
    lines = log(tmp_path)
    assert [line["tokens"] for line in lines if "loss" in line] == [4 * LENGTH * step for step in range(1, 8)]
    assert [line["step"] for line in lines if "kl" in line] == [0, 3, 6, 7]


def test_tokens_are_rounded_up_to_steps(tmp_path: Path) -> None:
    assert go(tmp_path, student(), steps=None, tokens=4 * LENGTH * 2 + 1).steps == 3


def test_the_same_seed_does_the_same_and_another_does_not(tmp_path: Path) -> None:
    found, cache = [], cached(tmp_path / "c", R, H)
    for i, seed in enumerate((0, 0, 1)):
        model = student(attention_dropout=0.1)
        # Whatever was drawn before.
        torch.manual_seed(i)
        train(model, one_group, Distillation(R, H, cache), settings(steps=3, seed=seed), tmp_path / str(i))
        found.append(model.lm_head.weight.detach().clone())
    assert found[0].equal(found[1]) and not found[0].equal(found[2])


def test_seconds_end_it_with_the_rate_at_zero(tmp_path: Path) -> None:
    began = time.monotonic()
    result = go(tmp_path, student(), steps=None, seconds=2.0, eval_every=1000)
    assert result.stopped == "budget" and result.steps > 5
    # Not one step longer than asked; the caller's cache and start are within the rest.
    assert result.seconds < 2.2 and time.monotonic() - began < 6
    rates = [line["lr/all"] for line in log(tmp_path) if "loss" in line]
    assert max(rates) > 2.5e-3 and rates[-1] < 3e-4


def test_seconds_that_hold_no_step_keep_the_start(tmp_path: Path) -> None:
    result = go(tmp_path, student(), steps=None, seconds=1e-6)
    assert (result.steps, result.improved) == (0, False)


def test_without_improvement_the_start_is_kept(tmp_path: Path) -> None:
    model = student(0.001)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = go(tmp_path, model, steps=40, eval_every=2, patience=3, warmup_share=0.0, learning_rates={"all": 0.3})
    assert (result.stopped, result.steps, result.best_step, result.improved) == ("patience", 6, 0, False)
    assert "the start is kept" in str(result)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert state.best_of(tmp_path / "run") == (0, result.first_loss, [])


def test_a_loss_that_is_no_number_stops_it_with_the_best_kept(tmp_path: Path) -> None:
    model = student()

    def spoil(step: int, *_: float) -> None:
        if step == 6:
            with torch.no_grad():
                model.model.norm.weight.fill_(torch.nan)

    with pytest.raises(TrainingError, match=r"step 7: the loss is nan\. Lower the learning rates"):
        go(tmp_path, model, tell=spoil)
    assert state.best_of(tmp_path / "run")[0] == 5
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_start_that_is_no_number_is_told_as_that(tmp_path: Path) -> None:
    model = student()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(TrainingError, match=r"step 0: the KL is nan\. Give a student"):
        go(tmp_path, model)


def test_a_gradient_that_is_no_number_stops_it(tmp_path: Path) -> None:
    model = student()
    model.model.norm.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(TrainingError, match="step 1: the norm of the gradients is"):
        go(tmp_path, model)


def test_one_row(tmp_path: Path) -> None:
    model = student()
    result = go(tmp_path, model, rows(1), H, steps=3)
    assert result.steps == 3
    assert [line["tokens"] for line in log(tmp_path) if "loss" in line] == [LENGTH, 2 * LENGTH, 3 * LENGTH]


def test_checkpointing_changes_memory_and_not_numbers(tmp_path: Path) -> None:
    found = []
    for on in (False, True):
        model = student()
        go(tmp_path / str(on), model, steps=3, gradient_checkpointing=on)
        assert not model.is_gradient_checkpointing
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_bf16_products_with_parameters_in_f32(tmp_path: Path) -> None:
    exact = go(tmp_path / "a", student(), steps=8)
    model = student()
    half = go(tmp_path / "b", model, steps=8, dtype="bf16")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    # 8 bits in every product, and yet the same course.
    assert half.best_loss != exact.best_loss and half.best_loss == pytest.approx(exact.best_loss, rel=0.1)


def test_a_student_whose_logits_are_its_own_matter(tmp_path: Path) -> None:
    model = student()
    model.lm_head.register_forward_hook(lambda module, given, out: out * 1.0)
    result = go(tmp_path, model)
    assert result.best_loss == pytest.approx(go(tmp_path / "plain", student()).best_loss, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"r": rows(0)}, "training rows: they have the shape"),
        ({"h": rows(0)}, "held-out rows: they have the shape"),
        ({"h": np.concatenate([H, R[3:5]])}, "2 of them are training rows too"),
        ({"h": rows(2, 3, 8)}, "they have 8 tokens, the training rows 16"),
        ({"vocab_size": 97}, "the student has 97 tokens, the teacher 96"),
        ({"trainable": "nothing"}, "no parameter of it has requires_grad"),
        ({"dtype": torch.bfloat16}, "in which small steps vanish"),
        ({"groups": lambda name: "other"}, "its group other has no learning rate"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    model = student(trainable=given.get("trainable", ""), vocab_size=given.get("vocab_size", VOCABULARY)).to(
        given.get("dtype", torch.float32)
    )
    cache = cached(tmp_path / "c", R, H)
    with pytest.raises(OptionError, match=said):
        train(
            model,
            given.get("groups", one_group),
            Distillation(given.get("r", R), given.get("h", H), cache),
            settings(steps=1),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_a_cache_of_other_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="its digest of the rows"):
        train(student(), one_group, Distillation(R, rows(4, 9), cached(tmp_path / "c", R, H)), settings(steps=1), tmp_path / "run")


def test_tensorboard_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cached(tmp_path / "c", R, H)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="package `tensorboard` is not installed"):
        train(student(), one_group, Distillation(R, H, cache), settings(steps=1, tensorboard=True), tmp_path / "run")


def test_a_model_without_checkpointing_is_refused(tmp_path: Path) -> None:
    model = student()
    model.supports_gradient_checkpointing = False
    with pytest.raises(OptionError, match="transformers has none for LlamaForCausalLM"):
        go(tmp_path, model, gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stepps": 3}, "stepps: Extra inputs"),
        ({}, "exactly one of steps, tokens and seconds"),
        ({"steps": 1, "seconds": 1.0}, "exactly one of steps, tokens and seconds"),
        ({"steps": 0}, "steps: Input should be greater than 0"),
        ({"steps": 1, "learning_rates": {}}, "learning_rates: Dictionary"),
        ({"steps": 1, "learning_rates": {"all": -1.0}}, "learning_rates.all: Input should be greater than 0"),
        ({"steps": 1, "weight_decays": {"bias": 0.1}}, "weight_decays has the group bias"),
        ({"steps": 1, "dtype": "f16"}, "dtype: Input should be 'f32' or 'bf16'"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Settings.of({"learning_rates": {"all": 1e-3}, **values})


@pytest.mark.parametrize("count", [1, 5, 12])
@pytest.mark.parametrize("processes", [1, 2])
def test_every_row_comes_once_in_an_epoch(count: int, processes: int) -> None:
    if count < processes:
        with pytest.raises(OptionError, match="1 training rows: there are 2 processes"):
            share_out(count, processes, 4, 3)
        return
    shares = share_out(count, processes, 4, 3)
    stream = iter(MicroBatches(shares, 0, 0))
    micro = [next(stream) for _ in range(3 * count * shares.accumulated * processes)]
    assert all(0 < len(batch) <= 3 for batch in micro)
    per_step = shares.accumulated * processes
    steps = [[row for batch in micro[i : i + per_step] for row in batch] for i in range(0, len(micro), per_step)]
    assert all(len(step) == shares.step_rows for step in steps)
    # As many steps as three times the rows are whole epochs.
    assert np.bincount(np.concatenate(steps)).tolist() == [3 * shares.step_rows] * count
    later = iter(MicroBatches(shares, 0, 2))
    assert [next(later) for _ in range(per_step)] == micro[2 * per_step : 3 * per_step]


def test_tensorboard_gets_the_loss_of_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path, student(), steps=3, tensorboard=True)
    (folder,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents*") if path.parent.name != "run"}
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = [line["loss"] for line in read_log(tmp_path / "run" / "log.jsonl") if "loss" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(logged)
