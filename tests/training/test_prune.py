"""Masks on a model: which weights get one, statistics, schedules, the learned mode's loss, and the plain model that is left."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import llmcomp
from llmcomp import PruneMode, prune, pruning_statistic
from llmcomp.errors import NonFiniteWeightError, OptionError, RuleError
from llmcomp.options import IgnoredScope
from llmcomp.training.prune import RBLoss, set_ratio
from llmcomp.training.prune_schedules import (
    ExponentialMagnitudePruningScheduler,
    ExponentialRBPruningScheduler,
    MultiStepMagnitudePruningScheduler,
    MultiStepRBPruningScheduler,
    exponential_ratio,
    multi_step_ratio,
)
from llmcomp.training.strip import strip
from llmcomp.training.weights import find_weights

LOCAL, GLOBAL = PruneMode.UNSTRUCTURED_MAGNITUDE_LOCAL, PruneMode.UNSTRUCTURED_MAGNITUDE_GLOBAL
LEARNED = PruneMode.UNSTRUCTURED_REGULARIZATION_BASED


class Net(nn.Module):
    """One of each: a tied table and head, a bare matrix, convolutions, and what is never pruned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.back = nn.ConvTranspose1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.cell = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.back(self.conv(self.table(ids).transpose(1, 2)))).transpose(1, 2)
        return self.head(self.cell(x @ self.matrix)[0])


IDS = torch.arange(10).reshape(2, 5)


def test_which_weights() -> None:
    model = Net()
    assert [w.name for w in find_weights(model)] == ["table.weight", "conv.weight", "back.weight"]
    assert [w.name for w in find_weights(model, IDS)] == ["table.weight", "conv.weight", "back.weight", "matrix"]
    assert len(find_weights(model)[0].owners) == 2


@pytest.mark.parametrize("mode", [LOCAL, GLOBAL])
def test_statistic_and_strip(mode: PruneMode) -> None:
    model = prune(Net(), mode, ratio=0.5, examples_inputs=IDS)
    found = pruning_statistic(model)
    sizes = {"table.weight": 40, "conv.weight": 48, "back.weight": 16, "matrix": 16}
    assert {t.tensor_name: math.prod(t.shape) for t in found.pruned_tensors} == sizes
    assert found.pruning_ratio == 0.5
    parameters = sum(p.numel() for p in Net().parameters())
    assert found.global_pruning_ratio == 60 / parameters
    assert "masked weights" in str(found) and "0.500" in str(found)

    before = model.eval()(IDS)
    plain = strip(model)
    assert {n: tuple(p.shape) for n, p in plain.named_parameters()} == {n: tuple(p.shape) for n, p in Net().named_parameters()}
    torch.testing.assert_close(plain(IDS), before, rtol=0, atol=0)
    assert plain.head.weight is plain.table.weight
    named = dict(plain.named_parameters())
    assert sum(int((named[name] == 0).sum()) for name in sizes) == 60
    assert type(plain.conv) is nn.Conv1d and set(plain.state_dict()) == set(Net().state_dict())


def test_masks_are_taken_anew_from_the_weights_below_them() -> None:
    model = prune(Net(), LOCAL, ratio=0.5)
    whole = model.conv.parametrizations.weight.original.detach().clone()
    assert prune(model, LOCAL, ratio=0) is model
    assert len(model.conv.parametrizations.weight) == 1
    assert torch.equal(model.conv.weight, whole)


def test_ignored_scope() -> None:
    model = prune(Net(), GLOBAL, ratio=0.5, ignored_scope=IgnoredScope(names=("conv",), types=("Embedding",)))
    assert [t.tensor_name for t in pruning_statistic(model).pruned_tensors] == ["back.weight"]
    with pytest.raises(RuleError, match="conv"):
        prune(Net(), GLOBAL, ratio=0.5, ignored_scope=IgnoredScope(names=("cnov",)))
    with pytest.raises(RuleError, match="every weight"):
        prune(Net(), GLOBAL, ratio=0.5, ignored_scope=IgnoredScope(patterns=(".*",)))


def test_refusals() -> None:
    with pytest.raises(OptionError, match="needs one"):
        prune(Net(), LOCAL)
    with pytest.raises(OptionError, match=r"\[0, 1\)"):
        prune(Net(), LOCAL, ratio=1.0)
    with pytest.raises(OptionError, match="RBLoss"):
        prune(Net(), LEARNED, ratio=0.5)
    with pytest.raises(OptionError, match="is none"):
        prune(Net(), "magnitude", ratio=0.5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="already"):
        prune(prune(Net(), LOCAL, ratio=0.5), LEARNED)
    with pytest.raises(RuleError, match="no linear"):
        prune(nn.ReLU(), LOCAL, ratio=0.5)
    with pytest.raises(OptionError, match="no masks"):
        pruning_statistic(Net())
    with pytest.raises(OptionError, match="no learned masks"):
        RBLoss(prune(Net(), LOCAL, ratio=0.5), 0.5)
    with pytest.raises(OptionError, match="learns its masks"):
        set_ratio(prune(Net(), LEARNED), LEARNED, 0.5)
    model = Net()
    with torch.no_grad():
        model.conv.weight[0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteWeightError, match=r"conv\.weight"):
        prune(model, LOCAL, ratio=0.5)
    assert not hasattr(model.table, "parametrizations")
    with pytest.raises(AttributeError):
        llmcomp.no_such_name  # noqa: B018


def test_rb_loss_and_its_gradient() -> None:
    model = prune(nn.Sequential(nn.Linear(16, 8)), LEARNED)
    loss = RBLoss(model, 0.7)
    mask = model[0].parametrizations.weight[0]
    with torch.no_grad():
        mask.mask.fill_(0.3)
    value = loss()
    value.backward()
    # ((1 - 0.3) / 0.05)²; its derivative by one of 128 logits. f32.
    sigma = 1 / (1 + math.exp(-0.3))
    assert float(value.detach()) == pytest.approx(196, rel=1e-5) and loss.current_ratio == 0
    np.testing.assert_allclose(mask.mask.grad.numpy(), 2 * 0.7 / 0.05**2 / 128 * sigma * (1 - sigma), rtol=1e-5)
    assert not list(loss.parameters())


def test_learned_masks_reach_their_target() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    y = x[:, :4] @ torch.randn(4, 8)
    model = prune(nn.Sequential(nn.Linear(16, 8)), LEARNED)
    loss = RBLoss(model, 0.2, p=0.1)
    schedule = ExponentialRBPruningScheduler(loss, 0.2, 0.7, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(12):
        schedule.step()
        for _ in range(30):
            optimizer.zero_grad()
            (nn.functional.mse_loss(model(x), y) + loss()).backward()
            optimizer.step()
    # The loss is 0.25 at a distance of 0.05.
    assert abs(loss.current_ratio - 0.7) < 0.05
    plain = strip(model)
    kept = plain[0].weight != 0
    assert pruning_statistic(model).pruning_ratio == pytest.approx(float((~kept).float().mean()))
    # What is learned is which inputs matter: a mask by chance would keep a quarter of its weights on the four.
    assert kept[:, :4].sum() > 0.6 * kept.sum()


def test_ratios_by_epoch() -> None:
    steps = multi_step_ratio({1: 0.1, 3: 0.5, 5: 0.7})
    assert [steps(e) for e in range(7)] == [0.1, 0.1, 0.1, 0.5, 0.5, 0.7, 0.7]
    curve = exponential_ratio(0.1, 0.7, 5)
    wanted = [1 - 0.9 * (0.3 / 0.9) ** (min(e, 5) / 5) for e in range(8)]
    np.testing.assert_allclose([curve(e) for e in range(8)], wanted, rtol=1e-15)
    assert curve(5) == curve(9) == 0.7
    for bad in ({}, {3: 0.1, 1: 0.2}, {-1: 0.2}, {0: 1.0}):
        with pytest.raises(OptionError):
            multi_step_ratio(bad)
    with pytest.raises(OptionError, match="target_epoch"):
        exponential_ratio(0.1, 0.7, 0)


def test_schedules_set_masks_and_targets() -> None:
    model = prune(nn.Sequential(nn.Linear(10, 10)), LOCAL, ratio=0)
    schedule = MultiStepMagnitudePruningScheduler(model, mode=LOCAL, steps={0: 0.2, 2: 0.6})
    seen = []
    for _ in range(4):
        schedule.step()
        seen.append(round(pruning_statistic(model).pruning_ratio, 6))
    assert seen == [0.2, 0.2, 0.6, 0.6] and schedule.epoch == 4 and schedule.current_ratio == 0.6
    exponential = ExponentialMagnitudePruningScheduler(model, mode=GLOBAL, initial_ratio=0.0, target_ratio=0.75, target_epoch=2)
    exponential.step(epoch=1)
    assert pruning_statistic(model).pruning_ratio == 0.5 and exponential.epoch == 2

    loss = RBLoss(prune(nn.Sequential(nn.Linear(4, 4)), LEARNED), 0.1)
    multi = MultiStepRBPruningScheduler(loss, {0: 0.2, 1: 0.4})
    multi.step()
    multi.step()
    assert loss.target_ratio == 0.4
    with pytest.raises(OptionError, match="negative"):
        multi.step(epoch=-1)


def test_a_learned_mask_has_the_mode_of_its_model() -> None:
    model = nn.Sequential(nn.Linear(100, 100)).eval()
    whole = model[0].weight.detach().clone()
    assert torch.equal(prune(model, LEARNED)[0].weight, whole)
