"""The task's loss: which tokens it takes, what padding does to it, and one step of the loop against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcomp.errors import OptionError, TrainingError
from llmcomp.training import logits
from llmcomp.training.completions import Completions, summed_cross_entropy
from llmcomp.training.distill import train
from llmcomp.training.objectives import Completion
from llmcomp.training.tracker import read_log
from tests.training.elastic import RANKS, go
from tests.training.elastic import student as adapted
from tests.training.models import LENGTH, VOCABULARY, llama, one_group, pairs, settings, student


def cross_entropies(model: Any, row: np.ndarray, begins: int) -> np.ndarray:
    """[tokens of the completion that have one before them], of the row alone, in float64."""
    row = row[:LENGTH]
    with torch.no_grad():
        z = model(input_ids=torch.from_numpy(row)[None]).logits[0].double().numpy()
    log_q = z - z.max(-1, keepdims=True)
    log_q -= np.log(np.exp(log_q).sum(-1, keepdims=True))
    return np.array([-log_q[at - 1, row[at]] for at in range(max(begins, 1), len(row))])


def test_what_counts_is_the_completion() -> None:
    found = Completions.of([(np.array([5, 6, 7, 8, 9]), 3), (np.array([5, 6]), 0), (np.arange(9), 2)], 6)
    # Of a place that counts the next token is told.
    np.testing.assert_array_equal(found.counted, np.array([[0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]], bool))
    np.testing.assert_array_equal(found.ids, [[5, 6, 7, 8, 9, 0], [5, 6, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize("whole", [False, True])
def test_the_sum_is_that_of_rows_by_themselves(whole: bool) -> None:
    model, given = llama(), pairs(9)
    rows = Completions.of(given, LENGTH)
    expected = sum(float(cross_entropies(model, *pair).sum()) for pair in given)
    reading = logits.Reading(whole=True) if whole else logits.read(model)
    assert reading.whole == whole
    for padding in (0, 1, VOCABULARY - 1):
        ids = np.where(rows.ids == 0, padding, rows.ids) if padding == 1 else rows.ids.copy()
        for i, (row, _) in enumerate(given):
            ids[i, : min(len(row), LENGTH)], ids[i, len(row) :] = row[:LENGTH], padding
        found = summed_cross_entropy(model, reading, torch.from_numpy(ids), torch.from_numpy(rows.counted))
        # f32 logits of up to 20 nats, 9 rows.
        assert float(found.detach()) == pytest.approx(expected, rel=1e-5)


def test_gradients_are_those_of_torch() -> None:
    given, found = pairs(6), []
    rows = Completions.of(given, LENGTH)
    for ours in (True, False):
        model = student(0.0)
        if ours:
            loss = summed_cross_entropy(model, logits.read(model), torch.from_numpy(rows.ids), torch.from_numpy(rows.counted))
        else:
            labels = torch.from_numpy(np.where(rows.counted, np.roll(rows.ids, -1, 1), -100))
            z = model(input_ids=torch.from_numpy(rows.ids)).logits
            loss = torch.nn.functional.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="sum")
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    # Sums of f32 in another order, relative to the largest gradient.
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5 * float(found[1].abs().max()))


def test_a_batch_is_as_long_as_what_counts_in_it() -> None:
    objective = Completion(Completions.of([(np.arange(1, 5), 2), (np.arange(1, 9), 2)], LENGTH), Completions.of(pairs(1, 7), LENGTH))
    assert [t.shape for t in objective.rows.__getitems__([0])] == [(1, 4)] * 2
    assert [t.shape for t in objective.rows.__getitems__([0, 1])] == [(2, 8)] * 2
    assert objective.rows.counts.tolist() == [2, 6]


def test_one_step_is_the_mean_over_its_tokens(tmp_path: Path) -> None:
    """Whatever rows are in memory together."""
    given, held = pairs(8), pairs(4, 1)
    objective = Completion(Completions.of(given, LENGTH), Completions.of(held, LENGTH))
    expected, told = (np.concatenate([cross_entropies(student(), *pair) for pair in part]).mean() for part in (given, held))
    weights = []
    for size in (1, 3, 8):
        model, folder = student(), tmp_path / str(size)
        result = train(model, one_group, objective, settings(steps=1, batch_rows=8, microbatch_rows=size, warmup_share=0.0), folder)
        lines = read_log(folder / "log.jsonl")
        (line,) = [line for line in lines if "loss" in line]
        assert line["loss"] == pytest.approx(float(expected), rel=1e-5) and line["tokens"] == int(objective.rows.counts.sum())
        assert lines[0]["cross_entropy"] == result.first_loss == pytest.approx(float(told), rel=1e-5)
        weights.append(model.lm_head.weight.detach().clone())
    # Adam's first step has the size of the rate, 3e-3, whatever the gradient: roundings show where it is almost zero.
    assert all(float(((w - weights[0]).abs() < 1e-5).float().mean()) > 0.98 for w in weights)


@pytest.mark.parametrize("ranks", [(), RANKS])
def test_a_task_is_learnt_with_fixed_ranks_and_with_searched_ones(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """The completion repeats the last token of the prompt."""
    rng = np.random.default_rng(0)
    prompts = {tuple(rng.integers(1, 9, 3).tolist()) for _ in range(60)}
    given = [(np.array([*prompt, prompt[-1], prompt[-1]]), 3) for prompt in sorted(prompts)]
    objective = Completion(Completions.of(given[:-12], LENGTH), Completions.of(given[-12:], LENGTH))
    more = {"elastic_evaluations": 20} if ranks else {}
    result = go(tmp_path, adapted(8), objective, 0, ranks, steps=60, learning_rates={"all": 1e-2}, **more)
    assert result.measure == "cross_entropy" and result.best_loss < 0.25 * result.first_loss
    assert "held-out cross-entropy" in str(result) and bool(result.ranks) == bool(ranks)


def test_what_cannot_be_learnt_is_refused(tmp_path: Path) -> None:
    rows, held = Completions.of(pairs(4), LENGTH), Completions.of(pairs(3, 1), LENGTH)
    with pytest.raises(OptionError, match="held-out rows: 4 of them are training rows too"):
        Completion(rows, rows)
    empty = Completions.of([(np.arange(20), LENGTH), *pairs(2)], LENGTH)
    with pytest.raises(OptionError, match="training rows, row 0: no token of its completion is in it"):
        Completion(empty, held)
    large = Completions.of([(np.array([1, VOCABULARY]), 1)], LENGTH)
    with pytest.raises(OptionError, match=f"they hold token {VOCABULARY}, the student has {VOCABULARY}"):
        train(student(), one_group, Completion(rows, large), settings(steps=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_another_loss(tmp_path: Path) -> None:
    first = Completion(Completions.of(pairs(4), LENGTH), Completions.of(pairs(3, 1), LENGTH))
    train(student(), one_group, first, settings(steps=1, save_every=1), tmp_path / "run")
    again = Completion(Completions.of(pairs(4, 2), LENGTH), first.held_out.rows)
    with pytest.raises(TrainingError, match="it began with rows"):
        train(student(), one_group, again, settings(steps=1, save_every=1), tmp_path / "run", resume=True)
