from __future__ import annotations

import json
from typing import Any

import pytest

from llmcomp.errors import GroupSizeError, OptionError
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, make_plan
from tests.planning.layers import layer, model


def edited(change: Any) -> Plan:
    data = json.loads(make_plan(model(), ExportOptions(model="m")).to_json())
    change(data)
    return Plan.from_json(json.dumps(data), "plan p.json").check_against(model(), "plan p.json")


def test_round_trip() -> None:
    plan = make_plan(model(), ExportOptions(model="m"))
    assert Plan.from_json(plan.to_json()) == plan == Plan.from_json(plan.to_json()).check_against(model())
    assert sum(line.startswith('  {"name"') for line in plan.to_json().splitlines()) == len(plan.layers)


def test_an_edit_is_taken_and_its_bytes_are_counted_anew() -> None:
    plan = edited(lambda d: d["layers"][1].update(format="int8_sym", group_size=-1))
    assert plan.layers[1].format == "int8_sym" and plan.layers[1].bytes == 64 * 128 + 64 * 2
    assert plan.summary.bytes == sum(e.bytes for e in plan.layers) and plan.summary.ratio == round(5 / 6, 6)


def test_a_line_edited_into_a_float_may_keep_its_group_and_its_bytes() -> None:
    plan = edited(lambda d: d["layers"][1].update(format="keep"))
    assert (plan.layers[1].group_size, plan.layers[1].bytes) == (-1, 2 * 64 * 128)
    assert edited(lambda d: d["layers"][1].pop("bytes")).layers[1].bytes == 4096 + 256 + 64


def test_a_misspelt_name_is_found_far_down() -> None:
    data = make_plan(model(blocks=90), ExportOptions(model="m")).to_json().replace('"model.layers.89.up_proj"', '"model.layers.89.up_porj"')
    with pytest.raises(OptionError, match=r"Did you mean model\.layers\.89\.up_proj") as caught:
        Plan.from_json(data).check_against(model(blocks=90))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda d: d["layers"][1].update(format="int5"), OptionError, "int5"),
        (lambda d: d["layers"][1].update(format="codebook[1]"), OptionError, r"q_proj, codebook of 1 levels"),
        (lambda d: d["layers"][1].update(group_size=48), GroupSizeError, "48 does not divide 128"),
        (lambda d: d["layers"][0].update(format="nf4", group_size=64), OptionError, "looked up"),
        (lambda d: d["layers"][1].update(shape=[64, 64]), OptionError, "another model"),
        (lambda d: d["layers"][1].update(name="model.layers.0.q_porj"), OptionError, r"model\.layers\.0\.q_proj"),
        (lambda d: d["layers"][1].update(name="zzz"), OptionError, "another model"),
        (lambda d: d["layers"][1].update(tensor="other.weight"), OptionError, r"other\.weight"),
        (lambda d: d["layers"].append(d["layers"][0]), OptionError, r"embed_tokens.* 2 times"),
        (lambda d: d.update(main="int5"), OptionError, "main.* 'int5'"),
        (lambda d: d["layers"].pop(), OptionError, "lacks 1 of"),
        (lambda d: d["layers"][1].update(colour="red"), OptionError, r"layers\.1\.colour"),
        (lambda d: d.update(version=99), OptionError, "version 99"),
        (lambda d: d["layers"][1].update(group_size="many"), OptionError, "group_size"),
    ],
)
def test_an_edit_that_cannot_be(change: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        edited(change)
    assert "plan p.json" in str(caught.value)


def test_no_json() -> None:
    with pytest.raises(OptionError, match=r"plan p\.json: its top: "):
        Plan.from_json("[]", "plan p.json")
    with pytest.raises(OptionError, match="not JSON"):
        Plan.from_json("{", "plan")


def test_a_plan_for_another_model() -> None:
    plan = make_plan(model(), ExportOptions(model="m"))
    with pytest.raises(OptionError, match="no such layer"):
        plan.check_against([*model(blocks=1)])
    with pytest.raises(OptionError, match="lacks 1"):
        plan.check_against([*model(), layer("model.layers.1.more")])
