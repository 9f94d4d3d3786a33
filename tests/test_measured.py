"""measure, edit, plan, export on a two-layer model; predicted losses against those of exported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp import checkpoint as checkpoints
from llmcomp.calibration import Samples
from llmcomp.cli import main
from llmcomp.errors import NonFiniteWeightError, OptionError
from llmcomp.export import dry_run, export, measure_model, plan_model
from llmcomp.graph.model import ModelGraph
from llmcomp.graph.sections import Divider, UndividedError
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.measuring import measure
from llmcomp.options import ExportOptions
from llmcomp.planning import Measured, Plan, Scheme
from tests.reference.sensitivity import divergence
from tests.test_calibrated import TEXT
from tests.test_path import logits
from tests.tiny import save_shards, tiny_llama

ROWS = tuple(np.random.default_rng(1).integers(3, 260, (6, 48)))
BASE = Scheme("int4_sym", 32, "minmax")
DATA = {"num_samples": 6, "sequence_length": 48}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints with the last layer tied and apart, the float export of both, and text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("source")
        for name, tied in (("tied", True), ("apart", False)):
            tiny_llama(folder / name, tie_word_embeddings=tied)
            export(ExportOptions(model=str(folder / name), output=folder / f"{name}-float", weight_format="fp32", no_tokenizer=True))
        (folder / "text.txt").write_text(TEXT)
        yield folder


def graph_of(folder: Path) -> ModelGraph:
    checkpoint = checkpoints.open(str(folder))
    return ModelGraph(get_skeletons(checkpoint)[0], checkpoint)


def nats(
    folder: Path, scratch: Path, schemes: tuple[Scheme, ...] = (BASE,), tokens: int = 10_000
) -> tuple[Measured, dict[str, dict[str, float]]]:
    found, _ = measure(graph_of(folder), Samples("made up", "rows", ROWS), schemes, tokens, lambda *_: None, scratch, lambda _: None)
    return found, {x.name: x.nats for x in found.layers}


def true_loss(source: Path, name: str, out: Path, layers: list[str]) -> float:
    """KL of an export that rounds these layers alone, over all tokens of ROWS."""
    overrides = [f"{x}=int4_sym:32" for x in layers]
    export(
        ExportOptions(model=str(source / name), output=out, weight_format="fp32", override=overrides, folds="none", no_tokenizer=True),
    )
    z, y = (np.concatenate([logits(f / "openvino_model.xml", row[None])[0] for row in ROWS]) for f in (source / f"{name}-float", out))
    return float(divergence(z, y).mean())


B1 = "model.layers.1."
ATTENTION, MLP = [f"{B1}self_attn.{x}_proj" for x in "qkv"], [f"{B1}mlp.{x}_proj" for x in ("gate", "up")]


@pytest.mark.parametrize("layers", [[f"{B1}self_attn.o_proj"], ATTENTION, ["model.embed_tokens"], ["lm_head"]])
def test_losses_are_those_of_models_so_rounded(source: Path, tmp_path: Path, layers: list[str]) -> None:
    """All layers of a site together, as they are pushed."""
    found, by_layer = nats(source / "apart", tmp_path)
    assert found.tokens == 6 * 48
    # Stored scales are f16, those tried are f32: a 4096th of a weight, beside a step of a 15th of the largest.
    assert sum(by_layer[x]["int4_sym:32"] for x in layers) == pytest.approx(true_loss(source, "apart", tmp_path / "o", layers), rel=0.03)


@pytest.mark.parametrize("name", ["tied", "apart"])
def test_the_interaction_makes_the_sum_that_of_the_whole(source: Path, tmp_path: Path, name: str) -> None:
    found, by_layer = nats(source / name, tmp_path)
    whole = true_loss(source, name, tmp_path / "o", list(by_layer))
    assert found.interaction * sum(x["int4_sym:32"] for x in by_layer.values()) == pytest.approx(whole, rel=0.03)


@pytest.mark.longest
def test_a_single_layer_of_a_site_is_near_its_share(source: Path, tmp_path: Path) -> None:
    _, by_layer = nats(source / "apart", tmp_path)
    for i, name in enumerate([ATTENTION[2], MLP[0]]):
        true = true_loss(source, "apart", tmp_path / str(i), [name])
        # The share is by how far the block's output moves, whatever the direction.
        assert true / 2 < by_layer[name]["int4_sym:32"] < 2 * true


@pytest.mark.longest
def test_other_candidates_follow_from_the_first(source: Path, tmp_path: Path) -> None:
    """What is told for int8 and another group, from int4 tried, is near what is told where these were tried."""
    others = Scheme("int8_asym", -1), Scheme("int4_asym", 32)
    _, told = nats(source / "apart", tmp_path, (BASE, *others))
    for scheme in others:
        _, tried = nats(source / "apart", tmp_path, (scheme,))
        name = f"{scheme.format}:{scheme.group_size}"
        for layer, losses in tried.items():
            # Square laws hold up to a few nats per mille; KL of so few tokens scatters with each rounding.
            assert told[layer][name] == pytest.approx(losses[name], rel=0.5)


def test_blocks_that_cannot_be_told_apart(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, by_block = nats(source / "apart", tmp_path)

    def undivided(*_: Any) -> Any:
        raise UndividedError("made up")

    monkeypatch.setattr(Divider, "_cuts", undivided)
    for name in ("apart", "tied"):
        _, whole = nats(source / name, tmp_path)
        assert all(x["int4_sym:32"] > 0 for x in whole.values())
    _, whole = nats(source / "apart", tmp_path)
    for layer in (f"{B1}self_attn.o_proj", "model.embed_tokens", "lm_head"):
        # Other sums of f32.
        assert whole[layer]["int4_sym:32"] == pytest.approx(by_block[layer]["int4_sym:32"], rel=1e-2)
    found, warnings = measure(graph_of(source / "apart"), Samples("", "", ROWS), (), 0, lambda *_: None, tmp_path, lambda _: None)
    assert warnings == ["measured in one pass over the whole model, in memory: made up"] and found.tokens == 6 * 48


def test_few_tokens_are_whole_batches(source: Path, tmp_path: Path) -> None:
    found, _ = nats(source / "tied", tmp_path, tokens=50)
    assert found.tokens == 2 * 48


def test_measure_edit_plan_export(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(source / "tied"), ["--dataset", str(source / "text.txt"), "--num-samples", "6", "--sequence-length", "48"]
    files = [tmp_path / f"{i}.json" for i in range(2)]
    for file in files:
        assert main(["measure", model, "-o", str(file), "--sym", "--group-size", "32", "--probe-tokens", "96", *data]) == 0
    assert files[0].read_text() == files[1].read_text()
    found = json.loads(files[0].read_text())
    assert found["data"].startswith("6 samples of 48 tokens") and found["tokens"] == 96 and found["interaction"] > 0
    assert len(found["layers"]) == 15 and all(len(x["metrics"]) == 5 and "int8_asym:-1" in x["nats"] for x in found["layers"])

    by_metric = ["--ratio", "0.5", "--sym", "--group-size", "32", "--sensitivity", str(files[0]), "--sensitivity-metric"]
    plan = ["plan", model, "-o", str(tmp_path / "plan.json"), "--overwrite", *by_metric]
    assert main([*plan, "predicted_loss"]) == 0
    kept = {x.name for x in Plan.from_json((tmp_path / "plan.json").read_text()).layers if x.format == "int8_asym"}
    edited = next(x for x in found["layers"] if x["name"] not in kept)
    edited["nats"]["int4_sym:32"] = 100.0
    files[0].write_text(json.dumps(found))
    assert main([*plan, "predicted_loss"]) == 0
    again = Plan.from_json((tmp_path / "plan.json").read_text())
    assert {x.name: x.format for x in again.layers}[edited["name"]] == "int8_asym" and 0.4 < again.summary.ratio < 0.6

    capsys.readouterr()
    assert main(["measure", model, "-o", str(files[0]), *data]) == 3 and "--overwrite" in capsys.readouterr().err
    files[1].write_text(files[1].read_text().replace("96, 96]", "96, 95]", 1))
    assert main([*plan[:-2], str(files[1]), "--sensitivity-metric", "predicted_loss"]) == 2
    assert "another model" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["export", model, str(out), "--no-tokenizer", *by_metric, "max_activation_variance"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert {x["format"] for x in report["layers"]} == {"int4_sym", "int8_asym"}


@pytest.mark.parametrize("metric", ["hessian_input_activation", "predicted_loss"])
def test_measured_in_place(source: Path, tmp_path: Path, metric: str) -> None:
    """As from a file with the same data."""
    same: dict[str, Any] = {"model": str(source / "tied"), "weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True}
    data: dict[str, Any] = {"dataset": str(source / "text.txt"), **DATA}
    (tmp_path / "m.json").write_text(measure_model(ExportOptions(**same, **data)).to_json())
    by_metric: dict[str, Any] = {**same, "ratio": 0.5, "sensitivity_metric": metric}
    plan = plan_model(ExportOptions(**by_metric, sensitivity=tmp_path / "m.json"))
    assert plan_model(ExportOptions(**by_metric, **data)) == plan and 0.4 < plan.summary.ratio < 0.6
    export(ExportOptions(**by_metric, **data, output=tmp_path / "out"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [x["format"] for x in report["layers"]] == [x.format for x in plan.layers] and not report["warnings"]
    assert dry_run(ExportOptions(**by_metric, **data, output=tmp_path / "other")).bin_bytes > 0


def test_the_model_can_write_the_text_itself(source: Path) -> None:
    found = measure_model(ExportOptions(model=str(source / "tied"), num_samples=2, sequence_length=24, dataset="auto", probe_tokens=24))
    assert found.tokens == 24 and all(x.nats for x in found.layers)


def test_damaged_weights_are_refused(source: Path, tmp_path: Path) -> None:
    tensors = tiny_llama(tmp_path / "bad")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_shards(tmp_path / "bad", tensors, 1)
    with pytest.raises(NonFiniteWeightError, match=r"up_proj.*row 3, column 5"):
        measure_model(ExportOptions(model=str(tmp_path / "bad"), dataset=str(source / "text.txt"), **DATA))


def test_data_is_demanded_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--sensitivity FILE"):
        plan_model(ExportOptions(model=str(tmp_path), ratio=0.5, sensitivity_metric="predicted_loss"))
