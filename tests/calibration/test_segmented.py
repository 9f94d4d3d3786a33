"""A block run from site to site computes what it computes at once, and knows what its layers' outputs are added to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmcomp.calibration.runner import Runner
from llmcomp.calibration.segmented import SegmentedSection, Stream
from llmcomp.graph.sections import divide
from tests.calibration.architectures import CONFIGS, save
from tests.calibration.test_runner import float_weights, open_graph, token_rows

ADDED = {
    "llama": {"o_proj", "down_proj"},
    "qwen3": {"o_proj", "down_proj"},
    "phi3": {"o_proj", "down_proj"},
    "gpt2": {"c_proj"},
}
"""Layers whose outputs go into the residual, where that is plain to see in the graph."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "llama" else [pytest.mark.longest]) for n in CONFIGS])
def test_sites_and_hidden_states_are_those_of_the_whole_block(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "m")
    graph = open_graph(tmp_path / "m")
    sections = divide(graph, lambda layer: "MatMul" in layer.ops and len(layer.shape) == 2)
    rng = np.random.default_rng(2)
    with Runner(sections, token_rows(), tmp_path) as runner:
        weights = float_weights(graph, sections, runner.used_ids())
        changed = {key: w + 0.1 * w.std() * rng.normal(size=w.shape).astype(np.float32) for key, w in weights.items()}
        runner.start(weights)
        for section in sections.parts[1:3]:
            opened, whole = SegmentedSection(runner, section), runner.open(section)
            sites = whole.observe(changed, moments_only=True)
            wanted = {key: one.second_moment for names, one in zip(section.sites, sites, strict=True) for key in names}
            after, float_after = whole.pushed(changed, runner.hidden), whole.pushed(weights, runner.hidden)
            stream, floats = Stream(runner.hidden), Stream(runner.hidden)
            opened.advance(0, stream, changed)
            opened.advance(0, floats, weights)
            added: set[str] = set()
            for site, names in enumerate(opened.sites):
                assert all(np.array_equal(wanted[key], opened.moments(site, stream)) for key in names)
                x, given = (np.concatenate(opened.inputs(site, one)) for one in (floats, stream))
                np.testing.assert_allclose(opened.drift(site, floats, stream), (x - given).T @ given / len(x), rtol=1e-3, atol=1e-5)
                pulls = opened.advance_floats(site + 1, floats, stream, weights)
                assert {*pulls, *opened.alone(site)} == set(names) and not {*pulls} & {*opened.alone(site)}
                added |= {key.split(".")[-1] for key in pulls}
                opened.advance(site + 1, stream, changed)
            assert added == ADDED.get(name, added)
            for found, expected in ((stream, after), (floats, float_after)):
                # The same operations in other models: the plugin may fuse and sum in another order.
                for one, other in zip(opened.out(found), expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_layer_in_front_of_the_residual_is_told_what_the_residual_lost(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    graph = open_graph(tmp_path / "m")
    sections = divide(graph, lambda layer: "MatMul" in layer.ops)
    with Runner(sections, token_rows(), tmp_path) as runner:
        weights = float_weights(graph, sections, runner.used_ids())
        runner.start(weights)
        opened = SegmentedSection(runner, sections.parts[1])
        lost = [0.1 * np.random.default_rng(i).normal(size=x.shape).astype(np.float32) for i, x in enumerate(runner.hidden)]
        stream, floats = Stream([x - d for x, d in zip(runner.hidden, lost, strict=True)]), Stream(runner.hidden)
        for one in (stream, floats):
            opened.advance(0, one, weights)
            opened.advance(1, one, weights)
        assert opened.sites[1] == ("model.layers.0.self_attn.o_proj",)
        x, given = (np.concatenate(opened.inputs(1, one)) for one in (floats, stream))
        found = opened.advance_floats(2, floats, stream, weights)["model.layers.0.self_attn.o_proj"]
        w = weights["model.layers.0.self_attn.o_proj"]
        drift = (x - given) @ w.T + np.concatenate([d.reshape(-1, d.shape[-1]) for d in lost])
        np.testing.assert_allclose(found, drift.T @ given / len(given), rtol=1e-3, atol=1e-5)


def test_factors_are_chosen_by_a_part_of_the_tokens_but_no_fewer_than_inputs(tmp_path: Path) -> None:
    save("llama", tmp_path / "m")
    graph = open_graph(tmp_path / "m")
    sections = divide(graph, lambda layer: "MatMul" in layer.ops)
    widest = max(layer.shape[-1] for layer in sections.parts[1].layers)
    rng = np.random.default_rng(0)
    with Runner(sections, [rng.integers(1, 96, n) for n in (widest - 8, 40, 20)], tmp_path) as runner:
        weights = float_weights(graph, sections, runner.used_ids())
        runner.start(weights)
        opened, before = SegmentedSection(runner, sections.parts[1]), [x.copy() for x in runner.hidden]
        for tokens, rows in ((1, 2), (widest + 32, 2), (widest + 33, 3), (10**6, 3)):
            stream, found = Stream(runner.hidden[:rows]), opened.observe(weights, tokens, list)
            for site, names in enumerate(opened.sites):
                opened.advance(site, stream, weights)
                assert all(np.array_equal(found[name], opened.moments(site, stream)) for name in names)
        assert all(np.array_equal(x, y) for x, y in zip(runner.hidden, before, strict=True)), "the hidden states stay where they are"
