"""What every number format makes of the real model that the tests and the demo use: measured into golden.yaml, or compared with it.

    python evaluation/golden.py [--check]

Each format is exported as `llmcomp export MODEL OUT --weight-format NAME` does it, judged as `llmcomp eval OUT --reference FP32 --text
evaluation/golden.txt --window 256 --windows 4` does it, and removed. With --check differences are listed and the exit code is 1 if there
are any. Without it the file is written anew: read its diff before you commit it, for that is what your change does to every format.
Fetches the model if `make demo` has not; needs 1.2 GB of temporary disk and 4 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from llmcomp import formats
from llmcomp.export import export
from llmcomp.judge import evaluate, load_text
from llmcomp.options import ExportOptions
from llmcomp.writing.report import version_of

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).with_name("golden.yaml")
TEXT = Path(__file__).with_name("golden.txt")
"""In the repository, as Python's help topics change with Python, and written for it, as a model may know any other text by heart."""
WINDOW, WINDOWS = 256, 4
"""Two windows give differences between runs just as well, but too few to say how much of a KL is the text: kl_se is 2 to 8 % of it with four."""
CODEBOOK = "codebook[-1.0,-0.5,-0.25,0.0,0.25,0.5,1.0]"
"""Stands for its family: as many levels as no code type has."""
VERSIONS = ("llmcomp", "openvino", "optimum-intel", "transformers", "torch", "numpy")
BATCH = 4
"""Models judged together. Each costs memory, each batch a pass of the reference."""
TOLERANCE = 0.01
"""Of a KL or of the logarithm of a perplexity; all else is exact.

Evidence: kernels for AVX2 instead of AVX-512 (ONEDNN_MAX_CPU_ISA) move a KL by 5e-6 of itself and no byte of an export. Would another CPU
round ties differently, one code in 100 000 moved by one step: 0.03 % for int4_sym, 0.9 % for int2_sym, whose model is a wreck anyway.
"""

Row = dict[str, Any]
"""One format's line: `layers` by "format:group size", `bin_bytes`, `bits`; and `kl`, `kl_se`, `ppl` if it was judged."""


def names() -> tuple[str, ...]:
    """Every registered format whose levels are known, and a member of each family. A fit of 210 tables takes minutes."""
    return (*(name for name in formats.names() if name != formats.ADAPTIVE), CODEBOOK)


def make(model: Path, name: str, out: Path, tokenizer: bool = False) -> Row:
    """Export into `out` and count. Neither verification, which is left out, nor a tokenizer touches a weight."""
    report = export(ExportOptions(model=str(model), output=out, weight_format=name, verify="none", no_tokenizer=not tokenizer)).report
    return {
        "layers": {f"{row['format']}:{row['group_size']}": row["layers"] for row in report["formats"]},
        "bin_bytes": (out / "openvino_model.bin").stat().st_size,
        "bits": report["bits_per_weight"],
    }


def judge(folders: Sequence[Path], reference: Path) -> tuple[Row, list[Row]]:
    """What the reference and each folder score; `reference` holds the tokenizer."""
    base, *scores = evaluate(
        [str(f) for f in folders], load_text(str(TEXT)), str(reference), tokenizer=str(reference), window=WINDOW, limit=WINDOWS
    )
    rows = []
    for s in scores:
        assert s.kl is not None and s.kl_standard_error is not None
        rows.append({"kl": round(s.kl, 6), "kl_se": round(s.kl_standard_error, 6), "ppl": round(s.perplexity, 4)})
    return {"ppl": round(base.perplexity, 4)}, rows


def head(model: Path) -> dict[str, Any]:
    """What was measured, and with what."""
    return {
        "model": {"file": model.name, "sha256": _sha256(model)},
        "text": {"file": TEXT.name, "sha256": _sha256(TEXT), "window": WINDOW, "windows": WINDOWS},
        "versions": {name: version_of(name) for name in VERSIONS},
    }


def measure(model: Path, work: Path) -> dict[str, Any]:
    """All of golden.yaml; the exports lie in `work`, a batch at a time beside the reference."""
    reference = work / "fp32"
    base, rows, left = make(model, "fp32", reference, tokenizer=True), {}, iter(names())
    while batch := list(islice(left, BATCH)):
        started = time.perf_counter()
        folders = [work / str(place) for place in range(len(batch))]
        made = [make(model, name, folder) for name, folder in zip(batch, folders, strict=True)]
        exported = time.perf_counter()
        score, scores = judge(folders, reference)
        base |= score
        for name, folder, row, damage in zip(batch, folders, made, scores, strict=True):
            rows[name] = row | damage
            print(f"{name}: {_line(rows[name])}", flush=True)
            shutil.rmtree(folder)
        print(f"# exported in {exported - started:.0f} s, judged in {time.perf_counter() - exported:.0f} s", flush=True)
    return {**head(model), "reference": {"format": "fp32", **base}, "formats": rows}


def differences(name: str, expected: Row | None, found: Row) -> list[tuple[str, str, str, str]]:
    """(format, figure, golden, found) of each figure in `found` that is not as expected. kl_se says how good a KL is, no more."""
    if expected is None:
        return [(name, "", "not in golden.yaml", "registered")]
    keys = [key for key in found if key != "kl_se" and not _agree(key, expected.get(key), found[key])]
    return [(name, key, str(expected.get(key)), str(found[key])) for key in keys]


def _agree(key: str, expected: Any, found: Any) -> bool:
    if expected is None or key not in ("kl", "ppl"):
        return bool(expected == found)
    if key == "ppl":
        expected, found = math.log(expected), math.log(found)
    return math.isclose(expected, found, rel_tol=TOLERANCE)


def compare(golden: Mapping[str, Any], found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """All differences; versions are not among them."""
    rows = [d for key in ("model", "text", "reference") for d in differences(key, golden[key], found[key])]
    rows += [d for name, row in found["formats"].items() for d in differences(name, golden["formats"].get(name), row)]
    return rows + [(name, "", "in golden.yaml", "not registered") for name in golden["formats"] if name not in found["formats"]]


def write(found: Mapping[str, Any], path: Path = GOLDEN) -> None:
    """One line for each format, in the order of the registry."""
    lines = ["command: python evaluation/golden.py", *(f"{key}: {_line(value)}" for key, value in found.items() if key != "formats")]
    lines += ["formats:", *(f"  {_line(name)}: {_line(row)}" for name, row in found["formats"].items())]
    path.write_text(COMMENT + "\n".join(lines) + "\n", encoding="utf8")


COMMENT = """\
# What every number format makes of one real model, with default options: number of layers by "format:group size", bytes of the .bin, bits
# per weight, scales included; KL(fp32 || format) in nats per token with its standard error over the windows, and perplexity.
# The model's own weights are Q4_1, 16 levels for each group of 32: the figures tell one state of a format from another, not formats apart.
# tests/evaluation/test_golden.py holds the project to it. Made by the command, not by hand.
"""


def read(path: Path = GOLDEN) -> dict[str, Any]:
    golden: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf8"))
    return golden


def _line(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize).removesuffix("\n").removesuffix("\n...")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with golden.yaml and leave it as it is")
    check = parser.parse_args().check
    model = runpy.run_path(str(ROOT / "scripts" / "fetch_smollm2.py"))["fetch"](ROOT / "models")
    with tempfile.TemporaryDirectory() as work:
        found = measure(model, Path(work))
    if not check:
        write(found)
        return 0
    golden = read()
    wrong = compare(golden, found)
    if wrong:
        # Versions do not fail, but may be why something else does.
        _table(wrong + differences("versions", golden["versions"], found["versions"]))
    else:
        print(f"all {len(found['formats'])} formats are as in {GOLDEN.name}")
    return int(bool(wrong))


def _table(rows: list[tuple[str, str, str, str]]) -> None:
    rows = [("format", "figure", "golden", "found"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
