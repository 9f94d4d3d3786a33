"""What each layer may become under a budget."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions
from llmcomp.planning import Measured, Plan
from llmcomp.planning.budget import CALIBRATED, CORRECTED, EQUALIZED, PLAIN, SECOND_ORDER, ladder
from llmcomp.planning.measured import MeasuredLayer
from tests.planning.layers import layer, model

NATS = {"int4_sym:64": 0.02, "int4_asym:32": 0.01, "nf4:64": 0.015, "int8_asym:-1": 0.0001}


def measured(layers: Sequence[Layer], nats: dict[str, float] | None = None) -> Measured:
    lines = tuple(MeasuredLayer(name=x.name, tensor=x.tensor, shape=x.shape, nats=nats or NATS) for x in layers)
    return Measured(data="made up", tokens=1, layers=lines)


def options(**values: object) -> ExportOptions:
    return ExportOptions(model="m", target_bpw=5, **values)


def test_every_layer_has_what_was_measured_and_its_readers_take() -> None:
    layers = model(1)
    found = ladder(layers, options(), measured(layers))
    formats = [[line.format for line in lines] for lines in found.lines]
    assert formats[0] == ["int4_sym", "int4_asym", "int8_asym"] and formats[1] == ["int4_sym", "int4_asym", "nf4", "int8_asym"]
    assert found.nats[0] == (0.02, 0.01, 0.0001) and not found.unknown
    assert [line.group_size for line in found.lines[1]] == [64, 32, 64, -1]


def test_a_rule_a_router_and_what_was_not_measured_leave_no_choice() -> None:
    layers = [*model(2), layer("model.layers.1.mlp.gate", 8, 128)]
    given = options(override=["model.layers.0.o_proj=int4_asym:32"], ignored_scope=["model.layers.0.q_proj"], backup_precision="int8_sym")
    found = ladder(layers, given, measured([x for x in layers if x.name != "lm_head"]))
    chosen = {
        lines[0].name: (lines[0].format, lines[0].group_size, nats)
        for lines, nats in zip(found.lines, found.nats, strict=True)
        if len(lines) == 1
    }
    assert chosen == {
        "model.layers.0.o_proj": ("int4_asym", 32, (0.01 * EQUALIZED,)),
        "model.layers.0.q_proj": ("keep", -1, (0.0,)),
        "lm_head": ("int8_sym", -1, (0.0,)),
        "model.layers.1.mlp.gate": ("int8_sym", -1, (0.0,)),
    }
    assert found.unknown == ("lm_head", "model.layers.1.mlp.gate")


@pytest.mark.parametrize(
    ("methods", "share"),
    [
        ({"folds": "none"}, PLAIN),
        ({}, EQUALIZED),
        ({"awq": True}, CALIBRATED),
        ({"awq": True, "gptq": True}, SECOND_ORDER),
        ({"gptq": True, "target_correction": True}, CORRECTED),
    ],
)
def test_what_helps_low_bits_counts_for_matrices_alone(methods: dict[str, object], share: float) -> None:
    layers = model(1)
    found = ladder(layers, options(**methods), measured(layers))
    assert found.nats[0] == (0.02, 0.01, 0.0001)
    assert found.nats[1] == pytest.approx((0.02 * share, 0.01 * share, 0.015 * share, 0.0001))


def test_a_choice_becomes_a_plan_that_a_file_holds() -> None:
    layers = model(1)
    found = ladder(layers, options(awq=True, scale_estimation=True, gptq=True, permutation="sorted"), measured(layers))
    plan = found.plan([2, 0, 1, 2, 3])
    assert [line.format for line in plan.layers] == ["int8_asym", "int4_sym", "int4_asym", "nf4", "int8_asym"]
    assert [line.rule for line in plan.layers[1:4]] == ["scale_estimation"] * 3 and plan.layers[1].rounding == "gptq"
    assert plan.folds == "awq" and plan.permutation == "sorted" and plan.main == "int8_asym"
    assert Plan.from_json(plan.to_json()).check_against(layers).layers == plan.layers


def test_without_low_bits_nothing_is_folded() -> None:
    layers = model(1)
    found = ladder(layers, options(awq=True, permutation="sorted"), measured(layers))
    plan = found.plan([len(lines) - 1 for lines in found.lines])
    assert plan.folds == plan.permutation == "none"


@pytest.mark.parametrize(("rule", "rules"), [("search", ["search", "search"]), ("absolute", ["absolute", "minmax"])])
def test_a_scale_rule_is_for_the_candidates_that_have_it(rule: str, rules: list[str]) -> None:
    layers = model(1)
    found = ladder(layers, options(scale_rule=rule, weight_format="int4_sym"), measured(layers))
    assert [line.rule for line in found.lines[1][:2]] == rules and found.lines[1][3].rule == "minmax"
