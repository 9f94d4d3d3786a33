"""Blocks that are stored behind the last one of the config: half a model would come out, and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcomp.errors import ArchitectureError
from llmcomp.export import dry_run
from llmcomp.options import ExportOptions
from tests.tiny import tiny_llama


@pytest.mark.parametrize("predicting", [0, 1])
def test_they_are_refused_unless_they_predict_further_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, predicting: int) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    tiny_llama(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    told = json.loads(file.read_text())
    blocks = told["num_hidden_layers"]
    told |= {"num_hidden_layers": blocks - 1} | ({"num_nextn_predict_layers": 1} if predicting else {})
    file.write_text(json.dumps(told))
    options = ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "o", no_tokenizer=True)
    if predicting:
        assert dry_run(options).bin_bytes > 0
        return
    with pytest.raises(
        ArchitectureError, match=rf"has model\.layers\.{blocks - 1}\..*, and .* config\.json .* ends with model\.layers\.{blocks - 2}"
    ):
        dry_run(options)
