"""Adapters of elastic rank in a torch model: what is in use, what is cut off, what the loop makes of them, and whether the search is worth its steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmcomp.errors import OptionError
from llmcomp.options.modes import StripFormat
from llmcomp.training import state
from llmcomp.training.adapters import load_adapters, save_adapters
from llmcomp.training.elastic import active_ranks, cut, set_ranks, space_of
from llmcomp.training.objectives import Distillation
from llmcomp.training.quantized import original, quantized_weights
from llmcomp.training.strip import strip
from llmcomp.training.tracker import read_log
from tests.training.apart import apart
from tests.training.elastic import RANKS, go, kl, layers, learnt, searching, student, teacher
from tests.training.models import cached, llama, rows

IDS = torch.from_numpy(rows(3, 5))
MIXED = tuple((8, 1, 4, 2, 8, 0, 2)[i % 7] for i in range(14))


def moved(rank: int = 8) -> Any:
    """Adapters as training leaves them, all ranks of another size."""
    model, generator = student(rank), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, _, one in quantized_weights(model):
            one.lora_B.add_(torch.randn(one.lora_B.shape, generator=generator) * 0.05)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_leading_ranks_are_in_use_and_no_others() -> None:
    """Against B A of leading ranks, in float64."""
    model = moved()
    set_ranks(model, MIXED)
    assert tuple(active_ranks(model).values()) == MIXED
    for (_, module, one), rank in zip(quantized_weights(model), MIXED, strict=True):
        b, a = one.lora_B.detach().double().numpy()[:, :rank], one.lora_A.detach().double().numpy()[:rank]
        under = original(module).detach()
        # f32 sums of at most eight products.
        np.testing.assert_allclose(one.latent(under).detach().numpy(), under.double().numpy() + b @ a, atol=1e-6)
        one.latent(under).sum().backward()
        assert not one.lora_A.grad[rank:].any() and not one.lora_B.grad[:, rank:].any()
        assert rank == 0 or one.lora_A.grad[:rank].any(1).all()


def test_costs_are_the_parameters_that_are_left() -> None:
    model = moved()
    space = space_of(model, (8, 4, 2, 1, 0))
    set_ranks(model, MIXED)
    cut(model)
    assert space.cost(MIXED) == sum(p.numel() for name, p in model.named_parameters() if "lora" in name)


@pytest.mark.parametrize("kind", list(StripFormat))
def test_cut_adapters_compute_the_same_and_vanish_as_others_do(kind: StripFormat) -> None:
    model = moved()
    everything = logits(model)
    set_ranks(model, MIXED)
    before = logits(model)
    assert float((everything - before).abs().max()) > 0.1
    ranks = cut(model)
    assert tuple(ranks.values()) == MIXED and {name for name, _, one in quantized_weights(model) if one.lora_A is None} == {
        name for name, rank in ranks.items() if not rank
    }
    # The same products of the same numbers, though they may be taken in another order.
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    # torch's own fake quantization may round a weight between two levels to the other one.
    torch.testing.assert_close(logits(strip(model, False, kind)), before, rtol=1e-3, atol=0.1 if kind is StripFormat.NATIVE else 1e-4)


def test_peft_reads_cut_adapters(tmp_path: Path) -> None:
    """Its merged weights are W + B A of the ranks that were chosen; layers without adapters are not touched."""
    from peft import PeftModel

    model = moved()
    set_ranks(model, MIXED)
    save_adapters(model, tmp_path / "uncut", "m")
    ranks = cut(model)
    save_adapters(model, tmp_path / "adapter", "m")
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert all((tmp_path / "uncut" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes() for name in names)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["r"] == 8 and told["rank_pattern"] == {name: rank for name, rank in ranks.items() if rank not in (0, 8)}
    assert set(told["target_modules"]) == {name for name, rank in ranks.items() if rank}
    base = llama()
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    first = llama()
    for name, _, one in quantized_weights(model):
        added = merged.get_submodule(name).weight.detach() - first.get_submodule(name).weight.detach()
        wanted = torch.zeros_like(added) if one.lora_A is None else (one.lora_B @ one.lora_A).detach()
        # PEFT adds in f32.
        torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-6)
    again = student(8)
    set_ranks(again, MIXED)
    cut(again)
    load_adapters(again, tmp_path / "adapter")
    assert logits(again).equal(logits(model))


def test_what_the_adapters_do_not_hold_is_refused() -> None:
    with pytest.raises(OptionError, match="the model has no adapters"):
        space_of(llama(), (4, 2))
    with pytest.raises(OptionError, match=r"rank 16 for model.layers.0.self_attn.q_proj: its adapter has rank 8"):
        space_of(student(8), (16, 8))
    with pytest.raises(OptionError, match="3 ranks: the model has 14 adapters"):
        set_ranks(student(8), (1, 2, 3))
    with pytest.raises(OptionError, match=r"rank 9 for model.layers.0.self_attn.q_proj: its adapter has rank 8"):
        set_ranks(student(8), (9,) * 14)


def test_a_run_uses_drawn_ranks_then_found_ones(tmp_path: Path) -> None:
    """Behind the search the ranks stand still, what is chosen is within the budget, and the best state is in use with its ranks on return."""
    model, seen = student(8), []
    r, h = rows(12), rows(4, 1)
    objective = Distillation(r, h, cached(tmp_path / "cache", r, h))
    model.model.register_forward_pre_hook(lambda *_: seen.append(tuple(active_ranks(model).values())) if torch.is_grad_enabled() else None)
    budget = space_of(model, RANKS).cost((2,) * 14) - 100
    result = go(
        tmp_path, model, objective, 0, RANKS, steps=10, microbatch_rows=12, elastic_budget=budget, elastic_evaluations=20, elastic_share=0.5
    )
    space = space_of(model, RANKS)
    assert seen[:5] == [space.draw(0, step) for step in range(5)]
    (line,) = [line for line in read_log(tmp_path / "run" / "log.jsonl") if "search" in line]
    assert line["step"] == 5 and line["search"] == 20 and line["found"] <= line["start"]
    assert len(set(seen[5:])) == 1 and space.cost(seen[5]) <= budget
    assert tuple(result.ranks.values()) == tuple(active_ranks(model).values()) == tuple(state.best_of(tmp_path / "run")[2] or (1,) * 14)
    assert all(p.shape[0] == 8 for name, p in model.named_parameters() if name.endswith("lora_A"))


def test_without_patience_left_it_searches_first(tmp_path: Path) -> None:
    r, h = rows(12), rows(4, 1)
    objective = Distillation(r, h, cached(tmp_path / "cache", r, h))
    more = {"steps": 60, "eval_every": 2, "patience": 2, "warmup_share": 0.0, "learning_rates": {"all": 0.5}, "elastic_evaluations": 3}
    result = go(tmp_path, student(8), objective, 0, RANKS, **more)
    assert result.stopped == "patience"
    lines = read_log(tmp_path / "run" / "log.jsonl")
    (searched,) = [line["step"] for line in lines if "search" in line]
    assert searched < 30 and result.steps >= searched + 4


# Before the search, between it and the next state, behind that state.
@pytest.mark.parametrize("kill", [pytest.param(kill, marks=pytest.mark.longest) for kill in (5, 7, 10)])
def test_a_killed_search_ends_as_an_undisturbed_one(tmp_path: Path, kill: int) -> None:
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    assert apart(searching, tmp_path / "undisturbed", 0, False) == 0
    assert apart(searching, tmp_path / "killed", kill, False) == -signal.SIGKILL
    assert apart(searching, tmp_path / "killed", 0, True) == 0
    found, logs = [], []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name / "run"
        last = state.newest(folder)
        assert last is not None
        found.append((load_file(last / state.TENSORS), load_file(folder / "best" / state.TENSORS), state.best_of(folder)))
        logs.append([{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder / "log.jsonl")])
    assert logs[0] == logs[1] and sum("search" in line for line in logs[0]) == 1
    assert found[0][2] == found[1][2]
    for one, two in zip(found[0][:2], found[1][:2], strict=True):
        assert all(tensor.equal(two[name]) for name, tensor in one.items()) and len(one) == 28


@pytest.mark.longest
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_searched_ranks_beat_a_fixed_one_of_the_same_cost(tmp_path: Path, seed: int) -> None:
    """After as many steps, on rows that neither has seen. Three layers of fourteen need eight ranks, the others none: the middle rank has two for each."""
    objective = learnt(tmp_path, seed)
    fixed, searched = student(2, seed), student(8, seed)
    start = kl(seed, fixed)
    go(tmp_path / "fixed", fixed, objective, seed)
    result = go(tmp_path / "nls", searched, objective, seed, RANKS)
    cut(searched)
    parameters = [sum(p.numel() for name, p in model.named_parameters() if "lora" in name) for model in (fixed, searched)]
    assert parameters[1] <= parameters[0]
    assert kl(seed, searched) < 0.8 * kl(seed, fixed) < 0.8 * 0.6 * start
    damaged = {
        name for (name, now), (_, then) in zip(layers(llama()), layers(teacher(seed)), strict=True) if not now.weight.equal(then.weight)
    }
    mean = np.mean([rank for name, rank in result.ranks.items() if name.removeprefix("model.") in damaged])
    assert len(damaged) == 3 and mean > 2
