"""What counts as got, what as a shortfall, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llmcomp.errors import NothingCompressedError
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, Share, make_plan
from tests.planning.layers import layer, model

ODD = 64 * 17


def plan(layers: list[Layer], **options: Any) -> Plan:
    scores = {one.name: 1.0 for one in layers}
    return make_plan(layers, ExportOptions(model="m", **options), scores)


def share(found: Plan) -> tuple[int, int]:
    assert found.share is not None
    return found.share.wanted, found.share.reached


def test_what_the_options_say_themselves_is_no_shortfall() -> None:
    everything = 6 * 64 * 128
    assert share(plan(model())) == (everything, everything)
    # Ignored, overridden to float: nobody wants a format there. Overridden to another format: got.
    found = plan(model(), ignored_scope=["*.0.q_proj"], override=["*.0.o_proj=keep", "*.1.q_proj=int8_asym"])
    assert share(found) == (4 * 64 * 128, 4 * 64 * 128) and not found.fallbacks
    assert share(plan(model(), ratio=0.0)) == (0, 0)
    assert share(plan(model(), ratio=0.5)) == (3 * 64 * 128, 3 * 64 * 128)
    # One of three: the nearest to a half that layers allow, and no shortfall.
    assert share(plan(model(blocks=1), ratio=0.4)) == (64 * 128, 64 * 128)
    # A table that cannot be looked up in the format is int8 by rule.
    found = plan(model(), weight_format="mxfp4", all_layers=True)
    assert share(found) == (6 * 64 * 128 + 1000 * 128,) * 2
    assert [(one.layer, one.asked, one.got) for one in found.fallbacks] == [("model.embed_tokens", "mxfp4:32", "int8_asym")]


def test_a_smaller_group_is_the_precision_and_another_format_is_not() -> None:
    layers = [*model(), layer("model.layers.1.narrow", 64, 96), layer("model.layers.1.odd", 64, 17)]
    found = plan(layers)
    wanted = 6 * 64 * 128 + 64 * 96 + ODD
    assert share(found) == (wanted, wanted - ODD)
    assert [(one.layer, one.asked, one.got, one.weights, one.is_shortfall) for one in found.fallbacks] == [
        ("model.layers.1.narrow", "int4_asym:64", "int4_asym:32", 64 * 96, False),
        ("model.layers.1.odd", "int4_asym:64", "int8_asym", ODD, True),
    ]
    assert "64 does not divide 17" in found.fallbacks[1].reason
    ignoring = plan(layers, group_size_fallback="ignore")
    assert share(ignoring) == (wanted, wanted - ODD - 64 * 96) and ignoring.fallbacks[0].got == "keep"


def test_an_override_that_does_not_fit_is_a_shortfall() -> None:
    layers = [*model(), layer("model.layers.1.odd", 64, 17)]
    found = plan(layers, weight_format="int8", override=["*.odd=int4_sym"])
    assert share(found) == (8 * 1000 * 128 // 4 + 6 * 64 * 128 + ODD, 2 * 1000 * 128 + 6 * 64 * 128)
    table = plan(model(), override=["*embed_tokens=nf4"])
    assert share(table) == (6 * 64 * 128 + 1000 * 128, 6 * 64 * 128)


def test_a_ratio_that_the_other_layers_can_meet_is_met() -> None:
    layers = [*model(), *(layer(f"model.layers.{i}.odd", 64, 17) for i in range(2))]
    counted = 6 * 64 * 128 + 2 * ODD
    assert share(plan(layers, ratio=0.5))[0] - share(plan(layers, ratio=0.5))[1] == 0
    # All that can take four bits is less than 99 % of what counts: 1 % may be missing, the rest is a shortfall.
    wanted, reached = share(plan(layers, ratio=0.99))
    assert (wanted, reached) == (round(0.99 * counted), 6 * 64 * 128)


def test_nothing_at_all_is_refused_with_what_would_be() -> None:
    odd = [layer(f"model.layers.0.{n}", 64, 17) for n in "abc"]
    with pytest.raises(
        NothingCompressedError, match=r"int4_asym: no layer can get it: model\.layers\.0\.a would get int8_asym .* Ask for int8_asym"
    ):
        plan(odd).check_reached()
    with pytest.raises(NothingCompressedError, match=r"would get keep .* Ask for fp16"):
        plan(odd, backup_precision="none").check_reached()
    for fine in (plan(model()), plan(odd, weight_format="int8"), plan(odd, weight_format="fp32"), plan(model(), ratio=0.0)):
        fine.check_reached()
    with pytest.raises(NothingCompressedError, match="no matrix"):
        plan([]).check_reached()


def test_a_plan_file_owes_the_same_until_somebody_edits_a_line() -> None:
    layers = [*model(), layer("model.layers.1.odd", 64, 17), layer("model.layers.1.odder", 64, 19)]
    found = plan(layers)
    again = Plan.from_json(found.to_json()).check_against(layers)
    assert again == found and share(again) == (6 * 64 * 128 + 64 * 36, 6 * 64 * 128)
    text = found.to_json().splitlines()
    (line,) = (i for i, one in enumerate(text) if '"name": "model.layers.1.odd"' in one)
    text[line] = text[line].replace('"format": "int8_asym"', '"format": "keep"')
    edited = Plan.from_json("\n".join(text)).check_against(layers)
    assert share(edited) == (6 * 64 * 128 + 64 * 36, 6 * 64 * 128 + ODD)
    assert [one.layer for one in edited.fallbacks] == ["model.layers.1.odder"]
    # A shortfall that nothing explains is none.
    bare = found.model_copy(update={"fallbacks": (), "share": Share(wanted=100, reached=0)}).check_against(layers)
    assert share(bare) == (100, 100)
