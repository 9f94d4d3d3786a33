"""Calibration on poor data: what never fires, what is dead, one token, one text again and again; and what must not matter: order and threads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.errors import CalibrationError
from llmcomp.export import export
from llmcomp.options import ExportOptions
from tests.test_calibrated import TEXT
from tests.test_path import logits
from tests.tiny import save_shards, tiny_llama

ALL = {"awq": True, "scale_estimation": True, "gptq": True, "weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True}
IDS = np.random.default_rng(7).integers(3, 260, (1, 24))

Tensors = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def as_made(tensors: Tensors) -> None:
    """A model like any other."""


def silent(tensors: Tensors) -> None:
    """Nothing arrives at down_proj: the gate is zero."""
    tensors["model.layers.0.mlp.gate_proj.weight"][:] = 0


def dead(tensors: Tensors) -> None:
    """Some channels of down_proj and o_proj never fire."""
    tensors["model.layers.0.mlp.up_proj.weight"][5:40] = 0
    tensors["model.layers.1.self_attn.v_proj.weight"][3] = 0


def overflowing(tensors: Tensors) -> None:
    """Gate times up is beyond float32."""
    tensors["model.layers.0.mlp.gate_proj.weight"] *= np.float32(1e22)
    tensors["model.layers.0.mlp.up_proj.weight"] *= np.float32(1e22)


def huge_queries(tensors: Tensors) -> None:
    """Attention looks at one token alone; squares of the weights are beyond float32."""
    times(tensors["model.layers.0.self_attn.q_proj.weight"], 1e30)


def heads_of_all_sizes(tensors: Tensors) -> None:
    """One key head is far larger than the other, and its queries are as much smaller: some below the least scale."""
    times(tensors["model.layers.1.self_attn.k_proj.weight"][:16], 1e9)
    times(tensors["model.layers.1.self_attn.q_proj.weight"][:48], 1e-9)


def times(rows: np.ndarray, factor: float) -> None:
    """In place, in the rows' own type: another would be traced anew."""
    rows[:] = (rows.astype(np.float64) * factor).astype(rows.dtype)


def one_norm_is_zero(tensors: Tensors) -> None:
    """q, k and v of a block see zeros only."""
    tensors["model.layers.1.input_layernorm.weight"][:] = 0


def checkpoint(folder: Path, change: Callable[[Tensors], None]) -> None:
    from safetensors.numpy import load_file

    tiny_llama(folder)
    tensors: Tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= {name: np.array(value) for name, value in load_file(shard).items()}
    change(tensors)
    save_shards(folder, tensors)


CASES = [
    pytest.param(change, data, marks=[] if change is as_made or (change, data) == (dead, "texts") else [pytest.mark.longest])
    for change in (as_made, silent, dead, one_norm_is_zero)
    for data in ("texts", "one token", "the same four times")
]


@pytest.mark.parametrize(("change", "data"), CASES)
def test_poor_data_does_no_harm(tmp_path: Path, change: Callable[[Tensors], None], data: str) -> None:
    checkpoint(tmp_path / "m", change)
    text = TEXT[:100]
    texts = {"texts": (TEXT,), "one token": (text,), "the same four times": (text,) * 4}[data]
    size = {"num_samples": 1, "sequence_length": 1} if data == "one token" else {"num_samples": 4, "sequence_length": 32}
    export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out", dataset=texts, **size, **ALL))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    told = {layer["name"]: layer["calibration"] for layer in report["layers"] if layer["calibration"]}
    assert len(told) == 14
    for name, line in told.items():
        assert np.isfinite([line["loss"], line["plain_loss"]]).all() and 0 <= line["loss"] <= line["plain_loss"], name
    assert np.isfinite(logits(tmp_path / "out" / "openvino_model.xml", IDS)[0]).all()


FEW = {"weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("methods", [{"scale_estimation": True}, ALL, {**ALL, "target_correction": True}, {"lora_correction": True}])
def test_weights_whose_squares_are_beyond_float32(tmp_path: Path, methods: dict[str, Any]) -> None:
    checkpoint(tmp_path / "m", huge_queries)
    data = {"dataset": (TEXT,), "num_samples": 4, "sequence_length": 32}
    export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out", **{**FEW, **data, **methods}))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    told = {layer["name"]: layer["calibration"] for layer in report["layers"] if layer["calibration"]}
    # int4's usual figure: a hundredth of the power.
    assert len(told) == 14 and all(0 < line["loss"] <= min(line["plain_loss"], 0.03) for line in told.values())
    assert np.isfinite(logits(tmp_path / "out" / "openvino_model.xml", IDS)[0]).all()


@pytest.mark.parametrize("methods", [{}, {"gptq": True}])
def test_rows_that_become_zeros_beside_others_are_told(tmp_path: Path, methods: dict[str, Any]) -> None:
    checkpoint(tmp_path / "m", heads_of_all_sizes)
    data = {"dataset": (TEXT,), "num_samples": 4, "sequence_length": 32} if methods else {}
    report = export(ExportOptions(model=str(tmp_path / "m"), output=tmp_path / "out", **{**FEW, **data, **methods})).report
    (told,) = (text for text in report["warnings"] if "below the least step" in text)
    assert "1 layers have" in told and "model.layers.1.self_attn.q_proj 144 for one" in told


@pytest.mark.parametrize("methods", [ALL, {**ALL, "gptq": False, "awq": False}, {**ALL, "scale_estimation": False, "awq": False}])
def test_inputs_beyond_float32_are_told_by_layer(tmp_path: Path, methods: dict[str, Any]) -> None:
    checkpoint(tmp_path / "model", overflowing)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf8")
    options = ExportOptions(
        model=str(tmp_path / "model"), output=tmp_path / "out", dataset=str(tmp_path / "text.txt"), sequence_length=16, **methods
    )
    with pytest.raises(CalibrationError, match=r"layers\.0\.mlp\.down_proj: .*overflows float32"):
        export(options)
    assert not (tmp_path / "out").exists()


def test_what_reads_zeros_alone_is_told(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", one_norm_is_zero)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf8")
    options = ExportOptions(
        model=str(tmp_path / "model"), output=tmp_path / "out", dataset=str(tmp_path / "text.txt"), sequence_length=16, **ALL
    )
    assert any("4 layers read nothing but zeros" in text for text in export(options).report["warnings"])


def test_the_order_of_the_samples_does_not_matter(tmp_path: Path) -> None:
    """Chats, each of which is a sample: of texts that are one long text to the windows, another order is another text."""
    tiny_llama(tmp_path / "m")
    chats = [{"messages": [{"role": "user", "content": TEXT[i * 37 : i * 37 + 60 + 9 * (i % 3)]}]} for i in range(12)]
    found = []
    for place, given in enumerate((chats, chats[::-1], chats[5:] + chats[:5])):
        data, out = tmp_path / f"{place}.jsonl", tmp_path / str(place)
        data.write_text("\n".join(map(json.dumps, given)))
        export(ExportOptions(model=str(tmp_path / "m"), output=out, dataset=str(data), num_samples=12, sequence_length=40, **ALL))
        found.append((out / "openvino_model.bin").read_bytes())
    assert found[0] == found[1] == found[2]


def test_one_thread_gives_nearly_the_codes_of_two(tmp_path: Path) -> None:
    """Sums come in another order, ties fall the other way: at most one byte of a thousand (more would say that chance decides)."""
    tiny_llama(tmp_path / "m")
    (tmp_path / "text.txt").write_text(TEXT)
    found = []
    for cores in (1, 2):
        out = tmp_path / str(cores)
        code = (
            "import os, sys\n"
            "here = sorted(os.sched_getaffinity(0))\n"
            "os.sched_setaffinity(0, here[: int(sys.argv[1])])\n"
            "from llmcomp.cli import main\n"
            "sys.argv = ['llmcomp', *sys.argv[2:]]\n"
            "sys.exit(main())\n"
        )
        asked = ["--awq", "--scale-estimation", "--gptq", "--weight-format", "int4_sym", "--group-size", "32", "--no-tokenizer", "--quiet"]
        data = ["--dataset", str(tmp_path / "text.txt"), "--num-samples", "8", "--sequence-length", "64"]
        command = [sys.executable, "-c", code, str(cores), "export", str(tmp_path / "m"), str(out), *asked, *data]
        subprocess.run(command, check=True, capture_output=True)
        found.append(np.frombuffer((out / "openvino_model.bin").read_bytes(), np.uint8))
    assert (found[0] != found[1]).mean() <= 0.001
