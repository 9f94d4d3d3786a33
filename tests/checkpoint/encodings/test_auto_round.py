"""AutoRound's checkpoints are those of GPTQ and AWQ under another name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmcomp import checkpoint
from tests.checkpoint.encodings import test_awq, test_gptq
from tests.checkpoint.encodings.store import check_decoded, refused, stored


def settings(packing: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": packing, **more}


def test_as_gptq_and_as_awq(tmp_path: Path) -> None:
    parts, weight = test_gptq.made(4, 64, 32, 32)
    folder = stored(tmp_path / "gptq", settings("auto_round:auto_gptq"), parts)
    check_decoded(checkpoint.open(folder), {f"{test_gptq.X}.weight": weight})
    encoded = checkpoint.open(folder).encoded(f"{test_gptq.X}.weight")
    assert encoded is not None and encoded.method == "auto-round" and encoded.held.forms[0].format == "int4_asym"
    parts, weight = test_awq.made(64, 32, 32)
    check_decoded(checkpoint.open(stored(tmp_path / "awq", settings("auto_round:auto_awq"), parts)), {f"{test_awq.X}.weight": weight})


def test_layers_of_other_bits(tmp_path: Path) -> None:
    parts, weight = test_gptq.made(8, 64, 32, 32)
    folder = stored(tmp_path, settings("auto_round:auto_gptq", extra_config={test_gptq.X: {"bits": 8}}), parts)
    check_decoded(checkpoint.open(folder), {f"{test_gptq.X}.weight": weight})


@pytest.mark.parametrize("packing", [None, "auto_round:llm_compressor", 3])
def test_other_packings(tmp_path: Path, packing: Any) -> None:
    refused(
        stored(tmp_path, settings(packing), test_gptq.GOOD), "packing_format .* is not read, only auto_round:auto_gptq, auto_round:auto_awq"
    )
