"""Blocks run one at a time see what the whole model sees: every site's statistics against hooks in transformers' own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.calibration import runner as runners
from llmcomp.calibration.runner import Runner
from llmcomp.calibration.statistics import SiteStatistics
from llmcomp.graph.inner import find_inner, reorder
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.sections import Divider, Sections, UndividedError, divide, take_orders
from llmcomp.graph.skeleton import get_skeletons
from tests.calibration.architectures import CONFIGS, save

LENGTHS = (9, 5, 9, 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))


def token_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 96, n) for n in LENGTHS]


def float_weights(graph: ModelGraph, sections: Sections, used: np.ndarray) -> dict[str, np.ndarray]:
    found = {}
    for layer in graph.layers:
        rows = np.asarray(graph.rows(layer, 0, int(np.prod(layer.shape[:-1]))), np.float32).reshape(layer.shape)
        found[layer.name] = rows[used] if layer is sections.embedding else rows
    return found


def open_graph(folder: Path) -> ModelGraph:
    checkpoint = checkpoints.open(str(folder))
    return ModelGraph(get_skeletons(checkpoint)[0], checkpoint)


def observed(graph: ModelGraph, scratch: Path, order: dict[str, np.ndarray] | None = None) -> tuple[dict[str, SiteStatistics], Sections]:
    """Layer name -> what its site saw, through all sections with float weights; `order`: reader -> one for its inner channels."""
    sections = divide(graph, lambda layer: "MatMul" in layer.ops and len(layer.shape) == 2)
    for one in find_inner(graph):
        graph = reorder(graph, one, order[one.readers[0]]) if order else graph
    take_orders(sections, graph)
    found: dict[str, SiteStatistics] = {}
    with Runner(sections, token_rows(), scratch) as runner:
        weights = float_weights(graph, sections, runner.used_ids())
        runner.start(weights)
        for section in sections.parts[1:]:
            opened = runner.open(section)
            for names, statistics in zip(section.sites, opened.observe(weights), strict=True):
                found |= dict.fromkeys(names, statistics)
            if not section.last:
                opened.advance(weights)
    return found, sections


def hooked(model: Any) -> dict[str, np.ndarray]:
    """Layer name -> all inputs of that module, [tokens, in]."""
    import torch
    from transformers.pytorch_utils import Conv1D

    seen: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            module.register_forward_pre_hook(
                lambda _, x, n=name: seen.setdefault(n, []).append(x[0].detach().reshape(-1, x[0].shape[-1]).numpy())
            )
    for row in token_rows():
        with torch.no_grad():
            model(torch.from_numpy(row[None]))
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "llama" else [pytest.mark.longest]) for n in CONFIGS])
def test_every_site_sees_what_it_sees_in_the_whole_model(tmp_path: Path, name: str) -> None:
    wanted = hooked(save(name, tmp_path / "m"))
    found, sections = observed(open_graph(tmp_path / "m"), tmp_path)
    assert [part.name for part in sections.parts[1:3]] == ["block 0", "block 1"]
    in_blocks = {n for n in wanted if n.split(".")[-1] != "lm_head"}
    routers = {n for n in in_blocks if n.endswith("mlp.gate")}
    assert in_blocks - routers <= found.keys()
    for key in in_blocks & found.keys():
        x, statistics = wanted[key].astype(np.float64), found[key]
        assert statistics.tokens == len(x) == sum(LENGTHS)
        # f32 through two blocks, in another order of summation.
        scale = np.abs(x.T @ x).max()
        np.testing.assert_allclose(statistics.products, x.T @ x, rtol=1e-3, atol=1e-4 * scale)
        np.testing.assert_allclose(statistics.max_abs, np.abs(x).max(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(statistics.total, x.sum(0), rtol=1e-3, atol=1e-3 * np.sqrt(scale))


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.longest), pytest.param("opt", marks=pytest.mark.longest)])
def test_inner_channels_in_another_order_are_seen_in_that_order(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "m")
    graph = open_graph(tmp_path / "m")
    rng = np.random.default_rng(1)
    orders = {one.readers[0]: rng.permutation(one.channels) for one in find_inner(graph)}
    assert len(orders) == 2
    plain, moved = observed(graph, tmp_path)[0], observed(graph, tmp_path, orders)[0]
    for key, statistics in plain.items():
        order = orders.get(key, np.arange(len(statistics.products)))
        scale = np.abs(statistics.products).max()
        # gpt2's and opt's biases are constants of the blocks: were they left behind, this would be off by their size.
        np.testing.assert_allclose(moved[key].products, statistics.products[order][:, order], rtol=1e-4, atol=1e-5 * scale)


def test_hidden_states_in_a_mapped_file_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path / "m")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, _ = observed(open_graph(tmp_path / "m"), tmp_path / "a")
    monkeypatch.setattr(runners, "MAPPED_FROM", 0)
    kept, keep = [], Runner.keep
    monkeypatch.setattr(Runner, "keep", lambda self, array: kept.append(keep(self, array)) or kept[-1])
    mapped, _ = observed(open_graph(tmp_path / "m"), tmp_path / "b")
    assert kept and all(isinstance(array, np.memmap) for array in kept)
    for name in plain:
        np.testing.assert_array_equal(plain[name].products, mapped[name].products)


def test_a_mapped_file_has_its_blocks_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a mapping that a full disk has no block for ends the process."""
    seen: list[bool] = []
    mapped = np.memmap

    def memmap(path: Path, kind: Any, mode: str, shape: tuple[int, ...]) -> Any:
        seen.append(path.stat().st_size == x.nbytes <= path.stat().st_blocks * 512)
        return mapped(path, kind, mode, shape=shape)

    x = np.random.default_rng(0).normal(size=(4, 64, 64)).astype(np.float32)
    runner = object.__new__(runners.Runner)
    runner.batches, runner.copies, runner.scratch, runner._files = [np.zeros((4, 64), np.int64)], 1, tmp_path, 0
    monkeypatch.setattr(runners, "MAPPED_FROM", 0)
    monkeypatch.setattr(runners.np, "memmap", memmap)
    kept = runner.keep(x)
    assert seen == [True]
    np.testing.assert_array_equal(kept, x)
    kept[:] = 1


def test_statistics_merge(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    whole, first, second = (SiteStatistics.empty(8) for _ in range(3))
    whole.add(x)
    first.add(x[:13].reshape(1, 13, 8))
    second.add(x[13:])
    first.merge(second)
    assert first.tokens == whole.tokens == 50
    np.testing.assert_allclose(first.second_moment, x.T.astype(np.float64) @ x / 50, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(first.max_abs, np.abs(x).max(0))
    np.testing.assert_allclose(first.total_abs, np.abs(x).sum(0), rtol=1e-5)
    np.testing.assert_allclose(first.total, x.sum(0), atol=1e-5)


def test_no_tokens_are_no_trouble() -> None:
    statistics = SiteStatistics.empty(4)
    statistics.add(np.zeros((0, 4), np.float32))
    assert np.isfinite(statistics.second_moment).all() and statistics.tokens == 0


def test_blocks_that_cannot_be_told_apart_are_one_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save("llama", tmp_path / "m")
    by_block, _ = observed(open_graph(tmp_path / "m"), tmp_path)
    monkeypatch.setattr(Divider, "_cuts", undivided)
    whole, sections = observed(open_graph(tmp_path / "m"), tmp_path)
    assert [part.name for part in sections.parts] == ["embedding", "the whole model"] and sections.undivided == "made up"
    assert by_block.keys() == whole.keys() and len(whole) == len(hooked(model))
    for name, statistics in whole.items():
        scale = np.abs(statistics.products).max()
        np.testing.assert_allclose(statistics.products, by_block[name].products, rtol=1e-3, atol=1e-4 * scale)


def undivided(*_: Any) -> Any:
    raise UndividedError("made up")
