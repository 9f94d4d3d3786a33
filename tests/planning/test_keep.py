"""Weight format keep: which form of its codes a layer gets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmcomp.checkpoint.encoded import Form
from llmcomp.errors import OptionError
from llmcomp.graph.layer import Layer
from llmcomp.graph.stored import Stored
from llmcomp.options import ExportOptions
from llmcomp.planning import LayerPlan, Plan, make_plan
from tests.planning.layers import layer, model

FOUR = Stored("gptq", (Form("int4_asym", 32, "f16"), Form("int8_asym", 32, "f16")))


def one(layer: Layer, stored: Stored | None) -> tuple[LayerPlan, Plan]:
    layers = [layer, *model()]
    found = make_plan(layers, ExportOptions(model="m", weight_format="keep"), stored={} if stored is None else {layer.name: stored})
    return found.layers[0], found


def test_the_smallest_form_and_its_exact_bytes() -> None:
    line, plan = one(layer("x"), FOUR)
    assert (line.format, line.group_size, line.rule, line.scale_type, line.reason) == ("int4_asym", 32, "stored", "f16", "gptq")
    # 64 rows of 4 groups: codes, f16 scales, zero points of 4 bits.
    assert line.bytes == 64 * 128 // 2 + 64 * 4 * 2 + 64 * 4 // 2
    assert all(other.format == "keep" and other.reason == "stored in float" for other in plan.layers[1:])
    assert plan.summary.bits_per_weight_requested == plan.summary.bits_per_weight and plan.folds == "none" and not plan.notes


def test_what_an_adapter_changes_has_no_codes() -> None:
    found = make_plan(model(), ExportOptions(model="m", weight_format="keep", adapter="a"))
    assert {line.reason for line in found.layers} == {"stored in float, or changed by the adapter"}


def test_scales_of_f32_and_sorted_columns_are_counted() -> None:
    line, _ = one(layer("x"), Stored("gptq", (Form("int4_sym", 32, "f32", True),)))
    assert (line.scale_type, line.sorted, line.bytes) == ("f32", True, 64 * 128 // 2 + 64 * 4 * 4 + 128 * 4)


def test_a_table_that_is_looked_up() -> None:
    table = layer("x", ops=("Gather",))
    line, plan = one(table, Stored("bitsandbytes", (Form("nf4", 64, "f32"),)))
    assert (line.format, line.reason) == ("keep", "bitsandbytes: nf4 cannot be looked up compressed")
    assert plan.notes[0] == "1 layers become float: bitsandbytes: nf4 cannot be looked up compressed"
    assert str(64 * 128 * 2) in plan.notes[1]
    assert one(table, FOUR)[0].format == "int4_asym"
    line, _ = one(table, Stored("gptq", (Form("int4_sym", 32, "f16", True),)))
    assert line.format == "keep" and "order of activations" in line.reason


def test_what_the_cpu_misreads_gets_the_next_form_or_float() -> None:
    odd = layer("x", width=127)
    forms = (Form("int4_sym", -1, "f16"), Form("int8_sym", -1, "f16"))
    assert one(odd, Stored("gptq", forms))[0].format == "int8_sym"
    line, _ = one(odd, Stored("gptq", forms[:1]))
    assert line.format == "keep" and "end inside a byte" in line.reason


def test_nothing_holds_it() -> None:
    line, plan = one(layer("x"), Stored("gptq", reason="because"))
    assert (line.format, line.rule, line.reason) == ("keep", "minmax", "gptq: because") and "gptq: because" in plan.notes[0]


def test_a_line_that_asks_for_codes_finds_their_type_anew() -> None:
    tensors = [layer("x"), *model()]
    _, plan = one(tensors[0], FOUR)
    text = plan.to_json()
    wide = {"x": replace(FOUR, forms=(Form("int4_asym", 32, "f32", True),))}
    line = Plan.from_json(text).check_against(tensors, stored=wide).layers[0]
    assert (line.scale_type, line.sorted, line.bytes) == ("f32", True, plan.layers[0].bytes + 64 * 4 * 2 + 128 * 4)
    with pytest.raises(OptionError, match="layer x: rule stored: it is not stored quantized"):
        Plan.from_json(text).check_against(tensors)
    with pytest.raises(OptionError, match=r"does not hold its gptq codes \(because\)"):
        Plan.from_json(text).check_against(tensors, stored={"x": Stored("gptq", reason="because")})
    rounded = json.loads(text)
    rounded["layers"][0].update(rule="search", scale_type="f32", sorted=True)
    line = Plan.from_json(json.dumps(rounded)).check_against(tensors).layers[0]
    assert (line.rule, line.scale_type, line.sorted) == ("search", "f16", False)
    rounded["layers"][0].update(format="offset[4]")
    with pytest.raises(OptionError, match=r"layer x: offset.4. rounds nothing"):
        Plan.from_json(json.dumps(rounded)).check_against(tensors)
