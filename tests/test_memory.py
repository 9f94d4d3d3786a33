"""Memory does not grow with the model, nor with the number of calibration samples: the peak of anonymous memory, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.test_calibrated import TEXT
from tests.tiny import save_shards, tiny_config, tiny_tensors, tiny_tokenizer

pytestmark = pytest.mark.longest

WATCH = """
import json, sys, threading, time
from pathlib import Path
from llmcomp.export import export
from llmcomp.options import ExportOptions
import llmcomp.kernels, openvino
def anonymous():
    # Files that are mapped, the source and what is written, are the system's to drop and do not count.
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
before, peak = anonymous(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
export(ExportOptions(**json.loads(sys.argv[1])))
print(json.dumps([before, peak]))
"""
MIB = 1 << 20


LAYERS = 6


def make(folder: Path, inner: int) -> Path:
    """As many layers whatever their width, so that the graph is the same; all alike, since no value of theirs matters here."""
    config = tiny_config(
        hidden_size=1024, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=16, head_dim=64, vocab_size=16384
    )
    config["num_key_value_heads"] = 16
    one = tiny_tensors(config)
    tensors = {name: value for name, value in one.items() if ".layers." not in name}
    for i in range(LAYERS):
        tensors |= {name.replace(".0.", f".{i}."): value for name, value in one.items() if ".layers." in name}
    config["num_hidden_layers"] = LAYERS
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_shards(folder, {name: np.asarray(value, ml_dtypes.bfloat16) for name, value in tensors.items()}, 4)
    tiny_tokenizer(folder, 16384)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {inner: make(folder / str(inner), inner) for inner in (1024, 6144)}


def peak(tmp_path: Path, model: Path, **options: Any) -> int:
    """Bytes of anonymous memory that an export takes at its height."""
    asked = {
        "model": str(model),
        "output": str(tmp_path / "out"),
        "no_tokenizer": True,
        "verify": "structure",
        "overwrite": True,
        **options,
    }
    done = subprocess.run([sys.executable, "-c", WATCH, json.dumps(asked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, highest = json.loads(done.stdout.splitlines()[-1])
    print(f"inner {model.name}, {options}: {before / MIB:.0f} MiB before, {highest / MIB:.0f} at the height")
    return int(highest)


def test_the_peak_does_not_grow_with_the_model(models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """122 MB and 311 MB."""
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    small, large = (peak(tmp_path, models[inner]) for inner in (1024, 6144))
    sizes = {inner: sum(path.stat().st_size for path in models[inner].glob("*.safetensors")) for inner in models}
    assert sizes[6144] > 300e6 > 2.4 * sizes[1024]
    # A few tiles for each worker whatever the model; but matrices of the small one are no more than half a tile (2^21 weights).
    assert large < 1.25 * small


def test_the_peak_does_not_grow_with_the_samples(models: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCOMP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT * 40, encoding="utf8")
    data = {"awq": True, "dataset": str(tmp_path / "text.txt"), "sequence_length": 128}
    few, many = (peak(tmp_path, models[1024], num_samples=count, **data) for count in (16, 64))
    assert many < 1.1 * few
