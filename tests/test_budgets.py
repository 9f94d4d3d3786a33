"""Budgets on a two-layer model: sizes are kept and used up, losses hold, what cannot be is refused and leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.budgeting import EVALUATIONS, Budgeting, Judged
from llmcomp.cli.main import main
from llmcomp.errors import BudgetError
from llmcomp.export import export, plan_model
from llmcomp.options import ExportOptions
from llmcomp.planning import Measured, Plan
from llmcomp.planning.budget import EQUALIZED
from llmcomp.planning.measured import MeasuredLayer
from tests.tiny import tiny_llama

SHARES = {"int4_sym:32": 1.0, "int4_asym:32": 0.8, "int8_asym:-1": 0.01}
"""What a layer loses with each candidate, over what it loses with the first."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint with eight layers a block and a file of made-up losses; one skeleton cache for the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("source")
        tiny_llama(folder / "tiny")
        plan = plan_model(ExportOptions(model=str(folder / "tiny")))
        rng = np.random.default_rng(0)
        lines = []
        for layer in plan.layers:
            loss = 0.01 * float(np.exp(rng.normal()))
            nats = {name: loss * share for name, share in SHARES.items()}
            lines.append(MeasuredLayer(name=layer.name, tensor=layer.tensor, shape=layer.shape, nats=nats))
        (folder / "measured.json").write_text(Measured(data="made up", tokens=1, layers=tuple(lines)).to_json())
        yield folder


def asked(source: Path, **options: Any) -> ExportOptions:
    given = {"sensitivity": source / "measured.json", "no_tokenizer": True, **options}
    return ExportOptions(model=str(source / "tiny"), **given)


def written(folder: Path) -> tuple[int, int]:
    xml = folder / "openvino_model.xml"
    return xml.stat().st_size, xml.with_suffix(".bin").stat().st_size


@pytest.mark.parametrize("size", ["330KB", "375.5 KB", 400_000, "350kb"])
def test_a_size_is_never_exceeded_and_used_up(source: Path, tmp_path: Path, size: object) -> None:
    export(asked(source, output=tmp_path / "out", target_size=size))
    budget = json.loads((tmp_path / "out" / "report.json").read_text())["budget"]
    # The smallest layers are 0.5 % of the whole, so that there is something for each per cent.
    assert 0.99 * budget["requested"] <= sum(written(tmp_path / "out")) <= budget["requested"]
    assert budget["reached"] == sum(written(tmp_path / "out"))


def test_more_room_than_the_candidates_need_is_left_over(source: Path, tmp_path: Path) -> None:
    export(asked(source, output=tmp_path / "out", target_size="1GB"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["format"] for row in report["formats"]] == ["int8_asym"] and report["budget"]["gap"] == 0


def test_the_size_of_a_plan_without_a_budget_is_spent_better(source: Path, tmp_path: Path) -> None:
    plain = {"weight_format": "int4_asym", "group_size": 32}
    export(ExportOptions(model=str(source / "tiny"), output=tmp_path / "plain", no_tokenizer=True, **plain))
    result = export(asked(source, output=tmp_path / "out", target_size="same", **plain))
    assert sum(written(tmp_path / "out")) <= sum(written(tmp_path / "plain"))
    measured = Measured.from_json((source / "measured.json").read_text())
    before = {
        line.name: f"{line.format}:{line.group_size}" for line in plan_model(ExportOptions(model=str(source / "tiny"), **plain)).layers
    }
    # Of the plain plan's layers the embedding alone has 8 bits, and equalizing does not help it.
    plain_loss = sum(line.nats[before[line.name]] * (1 if "embed" in line.name else EQUALIZED) for line in measured.layers)
    assert result.report["budget"]["nats"] < plain_loss


@pytest.mark.parametrize("bits", [5.0, 6.5, 7.2])
def test_bits_per_weight_count_every_element_of_the_source(source: Path, tmp_path: Path, bits: float) -> None:
    export(asked(source, output=tmp_path / "out", target_bpw=bits))
    elements = 320 * 96 + 2 * (96 * 96 * 2 + 2 * 32 * 96 + 3 * 160 * 96 + 2 * 96) + 96
    used = 8 * written(tmp_path / "out")[1] / elements
    assert 0.98 * bits <= used <= bits
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["budget"]["reached"] == pytest.approx(used) and report["budget"]["requested"] == pytest.approx(bits, rel=1e-4)


def test_the_plan_tells_how_near_to_the_best_it_is_and_its_table_is_true(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file, table_file = tmp_path / "plan.json", tmp_path / "table.json"
    command = ["plan", str(source / "tiny"), "--sensitivity", str(source / "measured.json"), "--target-bpw", "6"]
    assert main([*command, "-o", str(plan_file), "--table", str(table_file)]) == 0
    assert "--target-bpw 6.0000" in capsys.readouterr().err
    plan = Plan.from_json(plan_file.read_text())
    assert plan.budget is not None and plan.budget.gap == 0 and plan.budget.bound <= plan.budget.nats
    table = json.loads(table_file.read_text())
    assert len(table) > 5 and table == [point.model_dump() for point in plan.budget.table]
    for column, falls in (("bin_bytes", False), ("bits_per_weight", False), ("nats", True)):
        values = [point[column] for point in table]
        assert values == sorted(values, reverse=falls)
    # A point of the table is a budget's answer.
    point = table[4]
    again = plan_model(asked(source, target_bpw=8 * (point["bin_bytes"] + 64) / 172_512))
    assert again.budget is not None and again.budget.nats == pytest.approx(point["nats"])
    export(ExportOptions(model=str(source / "tiny"), output=tmp_path / "out", no_tokenizer=True, plan=plan_file))
    formats = {line["name"]: line["format"] for line in json.loads((tmp_path / "out" / "report.json").read_text())["layers"]}
    assert formats == {line.name: line.format for line in plan.layers}


def test_a_rule_holds_whatever_the_budget_says(source: Path) -> None:
    plan = plan_model(asked(source, target_bpw=4.9, override=["*.v_proj=int8_asym"]))
    assert {line.format for line in plan.layers if "v_proj" in line.name} == {"int8_asym"}


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"target_size": "100KB"}, r"--target-size 100,000 bytes: the smallest model .* has 3\d\d,\d\d\d bytes \(0.3 MB\)"),
        ({"target_bpw": 3.0}, r"--target-bpw 3: the smallest model .* has 4\.\d{4} bits per weight"),
    ],
)
def test_what_is_too_small_is_refused_with_the_smallest(source: Path, tmp_path: Path, budget: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        export(asked(source, output=tmp_path / "out", **budget))
    assert not list(tmp_path.iterdir())


def budgeting(source: Path, **options: Any) -> Budgeting:
    """The stage alone, over a graph of no weights."""
    from llmcomp.preparing import open_checkpoint, trace
    from llmcomp.progress import Progress
    from llmcomp.running import Run

    given = asked(source, **options)
    (graph,) = trace(open_checkpoint(given), given, Run(Progress()))
    stage = Budgeting(graph, given, Measured.from_json((source / "measured.json").read_text()), lambda plan: 1000 * len(plan.layers))
    stage.begin()
    return stage


def test_a_model_that_came_out_larger_makes_room_for_a_smaller_one(source: Path, tmp_path: Path) -> None:
    stage = budgeting(source, target_size=150_000)
    xml = tmp_path / "openvino_model.xml"
    xml.write_bytes(b"x" * 15_000)
    first = stage.plan.budget
    assert first is not None
    xml.with_suffix(".bin").write_bytes(b"x" * 136_000)

    def judge() -> Judged:
        raise AssertionError("a size is not judged")

    assert stage.misses(xml, judge)
    second = stage.plan.budget
    assert second is not None and second.reached <= 149_000 and second.nats > first.nats
    xml.with_suffix(".bin").write_bytes(b"x" * 134_500)
    assert not stage.misses(xml, judge) and stage.told()["reached"] == 149_500


def test_a_size_that_every_model_exceeds_is_given_up(source: Path, tmp_path: Path) -> None:
    stage = budgeting(source, target_bpw=7)
    xml = tmp_path / "openvino_model.xml"
    xml.write_bytes(b"")
    xml.with_suffix(".bin").write_bytes(b"x" * (stage.limit + 64))
    assert stage.misses(xml, lambda: Judged(0, 0, {})) and stage.misses(xml, lambda: Judged(0, 0, {}))
    with pytest.raises(BudgetError, match="3 models came out larger than planned, the last by 64 bytes"):
        stage.misses(xml, lambda: Judged(0, 0, {}))


def follow(stage: Budgeting, true: float, spread: float = 1.05) -> list[float]:
    """Run the stage against a model that truly loses `true` times the sum of its layers' losses; the predictions of what was made."""
    assert stage.options.sensitivity is not None
    losses = {line.name: line.nats for line in Measured.from_json(stage.options.sensitivity.read_text()).layers}
    made = []

    def judge() -> Judged:
        kl = true * sum(losses[line.name][f"{line.format}:{line.group_size}"] for line in stage.plan.layers)
        made.append(kl)
        return Judged(kl, spread * kl, {"kl": kl})

    while stage.misses(Path(), judge):
        assert len(made) <= EVALUATIONS
    return made


@pytest.mark.parametrize("true", [0.3, 0.97, 1.4, 3.0])
def test_a_loss_holds_by_its_upper_bound_whatever_was_predicted(source: Path, true: float) -> None:
    stage = budgeting(source, max_loss=0.05)
    made = follow(stage, true)
    told = stage.told()
    assert len(made) <= EVALUATIONS and len(told["evaluations"]) == len(made)
    assert 1.05 * told["reached"] <= 0.05 and told["reached"] >= 0.7 * 0.05
    assert stage.evaluation == {"kl": told["reached"]}


def test_a_loss_that_no_candidate_keeps_is_refused_with_what_was_reached(source: Path) -> None:
    stage = budgeting(source, max_loss=0.0005)
    assert stage.plan.notes == ("--max-loss 0.0005: no plan is predicted to keep it; this one is predicted to lose least",)
    with pytest.raises(
        BudgetError, match=r"--max-loss 0.0005: of 1 models .* loses 0.00\d+ nats per token, 0.00\d+ by the upper 95 % bound"
    ):
        follow(stage, 1.0)


def test_the_smaller_of_two_that_hold_is_made_again_if_a_third_does_not(source: Path) -> None:
    stage = budgeting(source, max_loss=0.05)
    answers = iter([0.02, 0.03, 0.2, 0.2])
    plans: list[Plan] = []

    def judge() -> Judged:
        plans.append(stage.plan)
        kl = next(answers)
        return Judged(kl, kl, {"kl": kl})

    while stage.misses(Path(), judge):
        pass
    held = min(plans[:2], key=lambda plan: plan.summary.bytes)
    assert len(plans) == EVALUATIONS and stage.plan.layers == held.layers
    assert stage.evaluation == {"kl": 0.03} and stage.told()["reached"] == 0.03


def test_a_loss_is_measured_on_the_written_model(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcomp.budgeting.EVALUATIONS", 1)
    result = export(asked(source, output=tmp_path / "out", max_loss=0.08, weight_format="int4_sym", group_size=32))
    budget = result.report["budget"]
    assert len(budget["evaluations"]) == 1 and budget["evaluations"][0]["upper"] <= 0.08
    assert budget["reached"] == budget["evaluations"][0]["kl"] == result.report["evaluation"]["kl"] > 0
    assert "max-loss" in (tmp_path / "out" / "report.md").read_text()
