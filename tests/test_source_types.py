"""Every method on every source type: the same values stored in another type give the same compressed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcomp.export import export
from llmcomp.options import ExportOptions
from tests.test_calibrated import TEXT
from tests.test_path import logits
from tests.tiny import DTYPES, save_shards, tiny_llama

METHODS: dict[str, dict[str, Any]] = {
    "data-free": {},
    "awq": {"awq": True},
    "se": {"scale_estimation": True},
    "gptq": {"gptq": True},
    "awq+se": {"awq": True, "scale_estimation": True},
    "se+gptq": {"scale_estimation": True, "gptq": True},
}
FORMATS = ("int4", "nf4", "mxfp4", "adaptive_codebook")
QUICK = [("se+gptq", "nf4")]
CASES = [
    pytest.param(method, name, marks=[] if (method, name) in QUICK else [pytest.mark.longest]) for method in METHODS for name in FORMATS
]
IDS = np.random.default_rng(3).integers(3, 260, (1, 32))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One model in every type: its values are small multiples of powers of two, which all hold exactly."""
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        tensors = tiny_llama(folder / "float32", torch_dtype="float32")
        for name, dtype in DTYPES.items():
            tiny_llama(folder / name, torch_dtype=name)
            save_shards(folder / name, {n: (np.rint(t * 256).clip(-255, 255) / 256).astype(dtype) for n, t in tensors.items()})
        yield folder


def run(sources: Path, out: Path, dtype: str, **asked: Any) -> dict[str, Any]:
    calibrated = {"awq", "scale_estimation", "gptq"} & asked.keys()
    data: dict[str, Any] = {"dataset": (TEXT,), "num_samples": 4, "sequence_length": 64} if calibrated else {}
    report = export(ExportOptions(model=str(sources / dtype), output=out, no_tokenizer=True, **data, **asked)).report
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def eight_bits(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The float model, and how far 8 bits take its logits away."""
    folder = tmp_path_factory.mktemp("damage")
    run(sources, folder / "float", "bfloat16", weight_format="fp32")
    run(sources, folder / "int8", "bfloat16", weight_format="int8")
    return folder / "float", distance(folder / "int8", folder / "float")


def distance(one: Path, other: Path) -> float:
    a, b = (logits(folder / "openvino_model.xml", IDS)[0].astype(np.float64) for folder in (one, other))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("method", "name"), CASES)
def test_every_method_in_every_source_type(sources: Path, eight_bits: tuple[Path, float], tmp_path: Path, method: str, name: str) -> None:
    (original, by_eight), written = eight_bits, {}
    for dtype in DTYPES:
        report = run(sources, tmp_path / dtype, dtype, weight_format=name, **METHODS[method])
        told = [layer["calibration"] for layer in report["layers"] if layer["calibration"]]
        assert all(0 < line["loss"] <= line["plain_loss"] for line in told)
        assert len(told) == (14 if {"scale_estimation", "gptq"} & METHODS[method].keys() else 0)
        written[dtype] = (tmp_path / dtype / "openvino_model.bin").read_bytes()
        # 4 bits are a sixteenth as fine as 8, and no further from the float model than another model is.
        assert 3 * by_eight < distance(tmp_path / dtype, original) < 0.8
    assert len(set(written.values())) == 1, [dtype for dtype in DTYPES if written[dtype] != written["float32"]]
