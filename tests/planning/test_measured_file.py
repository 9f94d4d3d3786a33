from __future__ import annotations

import json
from typing import Any

import pytest

from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.options import ExportOptions
from llmcomp.planning import Measured, MeasuredLayer, Plan, candidates, check_options, fitting, make_plan
from tests.planning.layers import layer, model


def measured() -> Measured:
    """The deeper a layer the worse it suffers by the metric, and the less by its loss."""
    nats = [{"int4_asym:64": 1.0 / (i + 1), "int8_asym:-1": 0.01} for i, _ in enumerate(model())]
    lines = tuple(
        MeasuredLayer(name=x.name, tensor=x.tensor, shape=x.shape, metrics={"max_activation_variance": float(i)}, nats=n)
        for i, (x, n) in enumerate(zip(model(), nats, strict=True))
    )
    return Measured(data="made up", tokens=512, interaction=1.25, layers=lines, weights="this")


def edited(change: Any) -> Measured:
    data = json.loads(measured().to_json())
    change(data)
    return Measured.from_json(json.dumps(data), "file s.json").check_against(model(), "this", "file s.json")


def test_round_trip() -> None:
    text = measured().to_json()
    assert Measured.from_json(text).check_against(model(), "this") == measured()
    assert sum(line.startswith('  {"name"') for line in text.splitlines()) == len(model())


def test_lines_may_be_missing_and_in_any_order() -> None:
    found = edited(lambda d: d.update(layers=d["layers"][:3][::-1]))
    assert [x.name for x in found.layers] == [x.name for x in model()[:3]]


def test_a_file_can_be_made_to_serve_relatives() -> None:
    assert edited(lambda d: d.update(weights=None)).layers == measured().layers


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda d: d["layers"][1].update(shape=[64, 64]), OptionError, "This file is for another model"),
        (lambda d: d["layers"][1].update(name="model.layers.0.q_porj"), OptionError, r"Did you mean model\.layers\.0\.q_proj"),
        (lambda d: d["layers"].append(d["layers"][0]), OptionError, "2 times"),
        (lambda d: d["layers"][1]["nats"].update({"int4_asym:64": -0.1}), OptionError, "int4_asym:64.*negative"),
        (lambda d: d["layers"][1]["nats"].update({"int5:64": 0.1}), OptionError, "no format 'int5'"),
        (lambda d: d["layers"][1]["nats"].update({"int4_asym": 0.1}), OptionError, "not FORMAT:GROUP"),
        (lambda d: d["layers"][1]["nats"].update({"int4_asym:0": 0.1}), OptionError, "not FORMAT:GROUP"),
        (lambda d: d["layers"][1]["nats"].update({"int4_asym:48": 0.1}), GroupSizeError, "48 does not divide 128"),
        (lambda d: d["layers"][1]["nats"].update({"mxfp4:64": 0.1}), OptionError, "groups of 32 by definition"),
        (lambda d: d["layers"][1]["nats"].update({"int4_asym:64": "much"}), OptionError, r"layers\.1\.nats\.int4_asym:64"),
        (lambda d: d["layers"][1]["metrics"].update(max_activation_variance=float("nan")), OptionError, r"layers\.1\.metrics"),
        (lambda d: d.update(interaction=0), OptionError, "interaction"),
        (lambda d: d.update(weights="that"), OptionError, "other weights"),
        (lambda d: d.update(version=2), OptionError, "version 2.*llmcomp measure"),
    ],
)
def test_what_cannot_be_is_named(change: Any, error: type[OptionError], words: str) -> None:
    with pytest.raises(error, match=words):
        edited(change)


def plan(found: Measured, **options: Any) -> Plan:
    asked = ExportOptions(model="m", dataset="text.txt", **{"ratio": 0.5, **options})
    return make_plan(model(), asked, found.scores(asked.sensitivity_metric), found)


def low(found: Plan) -> list[str]:
    return [x.name for x in found.layers if x.format == "int4_asym"]


def test_a_ratio_ranks_by_the_metric_or_by_the_loss() -> None:
    names = [x.name for x in model()[1:-1]]
    assert low(plan(measured(), sensitivity_metric="max_activation_variance")) == names[:3]
    assert low(plan(measured(), sensitivity_metric="predicted_loss")) == names[3:]


def test_an_edit_is_obeyed() -> None:
    found = edited(lambda d: d["layers"][1]["nats"].update({"int4_asym:64": 0.0}))
    assert low(plan(found, sensitivity_metric="predicted_loss"))[0] == model()[1].name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sensitivity_metric": "hessian_input_activation"}, r"6 layers have no sensitivity score, .*hessian"),
        ({"sensitivity_metric": "predicted_loss", "group_size": 32}, "its loss as int4_asym:32"),
        ({"sensitivity_metric": "predicted_loss", "backup_precision": "int8_sym"}, "its loss as int8_sym:-1"),
    ],
)
def test_what_was_not_measured_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        plan(measured(), **options)


def test_the_backup_may_be_float() -> None:
    assert low(plan(measured(), sensitivity_metric="predicted_loss", backup_precision="none"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": 0.5, "sensitivity_metric": "predicted_loss"}, "it looks at data"),
        ({"sensitivity_metric": "max_activation_variance", "dataset": "t.txt"}, "nothing that was asked for looks at data"),
        ({"weight_format": "fp4", "sensitivity": __file__}, "no layers are ranked"),
    ],
)
def test_idle_or_missing_options_are_told_first(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        check_options(ExportOptions(model="m", **options))


def test_candidates() -> None:
    def told(**options: Any) -> list[str]:
        return [f"{x.format}:{x.group_size}" for x in candidates(ExportOptions(model="m", **options))]

    assert told()[0] == "int4_asym:64" and told(sym=True, group_size=32)[0] == "int4_sym:32" and told()[-1] == "int8_asym:-1"
    assert len(set(told())) == len(told()) and told(weight_format="nf4")[0] == "nf4:64"
    assert told(candidates=["int4_sym:64, int8_asym:-1", "mxfp4:32"]) == ["int4_sym:64", "int8_asym:-1", "mxfp4:32"]
    for asked in ({"candidates": "int5:64"}, {"candidates": "nf4"}, {"weight_format": "fp16"}):
        with pytest.raises(OptionError):
            told(**asked)


def test_only_what_fits_is_tried() -> None:
    tried = candidates(ExportOptions(model="m", candidates="int4_sym:64,nf4:32,int8_asym:-1"))
    assert [x.format for x in fitting(layer("a", 8, 64), tried)] == ["int4_sym", "nf4", "int8_asym"]
    assert [x.format for x in fitting(layer("a", 8, 96), tried)] == ["nf4", "int8_asym"]
    table = fitting(layer("a", 8, 64, ("Gather", "MatMul")), tried)
    assert [(x.format, x.rule) for x in table] == [("int4_sym", "minmax"), ("int8_asym", "minmax")]
