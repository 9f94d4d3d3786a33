"""Masks and the learned mode's loss are NNCF's, where the asked number of weights is whole."""

from __future__ import annotations

import nncf
import pytest
import torch
from torch import nn

import llmcomp
from llmcomp.training.prune import RBLoss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 10), nn.Linear(10, 6), nn.Conv1d(6, 15, 1)
        self.table = nn.Embedding(4, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)).T[None]).mT + self.table(torch.zeros(1, dtype=torch.long))


X = torch.ones(3, 5)
WEIGHTS = ("a", "b", "c", "table")


@pytest.mark.parametrize("mode", ["UNSTRUCTURED_MAGNITUDE_LOCAL", "UNSTRUCTURED_MAGNITUDE_GLOBAL"])
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_masks(mode: str, ratio: float) -> None:
    theirs = nncf.prune(Net(), nncf.PruneMode[mode], ratio=ratio, examples_inputs=(X,)).state_dict()
    ours = llmcomp.prune(Net(), llmcomp.PruneMode[mode], ratio=ratio)
    for name in WEIGHTS:
        wanted = next(value for key, value in theirs.items() if f".{name}:weight" in key)
        assert torch.equal(getattr(ours, name).parametrizations.weight[0].binary_mask, wanted)


def test_loss() -> None:
    from nncf.torch.function_hook.pruning.rb.losses import RBLoss as Theirs

    mode = "UNSTRUCTURED_REGULARIZATION_BASED"
    theirs = nncf.prune(Net(), nncf.PruneMode[mode], ratio=None, examples_inputs=(X,))
    ours = llmcomp.prune(Net(), llmcomp.PruneMode[mode])
    logits = torch.linspace(-3, 2, 50).reshape(10, 5)
    mask = ours.a.parametrizations.weight[0].mask
    other = next(p for name, p in theirs.named_parameters() if ".a:weight" in name)
    torch.testing.assert_close(mask, other)
    with torch.no_grad():
        mask.copy_(logits)
        other.copy_(logits)
    found, wanted = RBLoss(ours, 0.6, p=0.1)(), Theirs(theirs, 0.6, p=0.1)()
    found.backward()
    wanted.backward()
    # f32 sums in another order.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(mask.grad, other.grad, rtol=1e-5, atol=0)
