"""What every number format makes of the real model that the tests and the demo use: measured into golden.yaml, or compared with it.

    python evaluation/golden.py [--check] [--model MODEL.gguf] [--work FOLDER]

Each format is exported as `llmcomp export MODEL OUT --weight-format NAME` does it, judged as `llmcomp eval OUT --reference FP32 --text
evaluation/golden.txt --window 256 --windows 4` does it, and removed. Without --check the file is written anew: read the diff before you
commit it, for it is the record of what a change to the compressor has done to every format.
"""

from __future__ import annotations

import argparse
import hashlib
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmcomp import formats
from llmcomp.export import export, version_of
from llmcomp.judge import Scores, Text, evaluate, load_text
from llmcomp.options import ExportOptions

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden.yaml")
TEXT = Path(__file__).with_name("golden.txt")
"""In the repository, as Python's help topics change with Python, and written for it, as a model may know any other text by heart."""
WINDOW, WINDOWS = 256, 4
CODEBOOK = "codebook[-1.0,-0.5,-0.25,0.0,0.25,0.5,1.0]"
"""Stands for its family; as few levels as show that they need not be a power of two."""
VERSIONS = ("llmcomp", "openvino", "optimum-intel", "transformers", "torch", "numpy")

Row = dict[str, Any]
"""One format's line: `layers` by "format:group size", `bin_bytes`, `bits`; and `kl`, `kl_se`, `ppl` if it was judged."""


def names() -> tuple[str, ...]:
    """Every registered format, and a member of each family."""
    return (*formats.names(), CODEBOOK)


def make(model: Path, name: str, out: Path, tokenizer: bool = False) -> Row:
    """Export into `out` and count. Verification and tokenizer are left out where nothing reads them: they do not touch a weight."""
    report = export(ExportOptions(model=str(model), output=out, weight_format=name, verify="none", no_tokenizer=not tokenizer)).report
    return {
        "layers": {f"{row['format']}:{row['group_size']}": row["layers"] for row in report["formats"]},
        "bin_bytes": (out / "openvino_model.bin").stat().st_size,
        "bits": report["bits_per_weight"],
    }


def judge(folders: list[Path], reference: Path) -> list[Scores]:
    """Scores of the reference and of each folder."""
    return evaluate([str(f) for f in folders], text(), str(reference), tokenizer=str(reference), window=WINDOW, limit=WINDOWS)


def damage(scores: Scores) -> Row:
    assert scores.kl is not None and scores.kl_standard_error is not None
    return {"kl": round(scores.kl, 5), "kl_se": round(scores.kl_standard_error, 5), "ppl": round(scores.perplexity, 3)}


def text() -> Text:
    return load_text(str(TEXT))


def measure(model: Path, work: Path, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """All of golden.yaml; `work` is where the exports lie, one at a time beside the reference."""
    reference = work / "fp32"
    row = make(model, "fp32", reference, tokenizer=True)
    found: dict[str, Any] = {
        "model": {"file": model.name, "sha256": _sha256(model)},
        "text": {"file": TEXT.name, "sha256": _sha256(TEXT), "window": WINDOW, "windows": WINDOWS},
        "versions": {name: version_of(name) for name in VERSIONS},
        "reference": {"format": "fp32"} | row,
        "formats": {},
    }
    for name in names():
        started = time.perf_counter()
        out = work / "compressed"
        row = make(model, name, out)
        made = time.perf_counter()
        base, scores = judge([out], reference)
        shutil.rmtree(out)
        found["reference"]["ppl"] = round(base.perplexity, 3)
        found["formats"][name] = row | damage(scores)
        tell(f"{name}: {_line(found['formats'][name])} # {made - started:.1f} s + {time.perf_counter() - made:.1f} s")
    return found


def write(found: Mapping[str, Any], path: Path = GOLDEN) -> None:
    """One line for each format, in the order of the registry."""
    head = ("command: python evaluation/golden.py", *(f"{k}: {_line(v)}" for k, v in found.items() if k != "formats"), "formats:")
    rows = (f"  {_line(name)}: {_line(row)}" for name, row in found["formats"].items())
    path.write_text(COMMENT + "\n".join((*head, *rows)) + "\n", encoding="utf8")


COMMENT = """\
# What every number format makes of one real model, with default options: number of layers by "format:group size", bytes of the .bin, bits
# per weight, scales included; KL(fp32 || format) in nats per token with its standard error over the windows, and perplexity.
# tests/evaluation/test_golden.py holds the project to it. Made by the command, not by hand.
"""


def read(path: Path = GOLDEN) -> dict[str, Any]:
    golden: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf8"))
    return golden


def _line(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize).removesuffix("\n").removesuffix("\n...")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
