"""Calibrated compression side by side with NNCF: KL on text that nothing saw, bytes, seconds; into evaluation/results/calibrated-NAME.json.

    python evaluation/calibrated.py CHECKPOINT WORK --calibration FILE --text FILE --format int4_sym --methods awq+scale_estimation gptq
        [--peer awq+scale_estimation+gptq ...] [--windows 24]

Both sides calibrate on the same token rows, the first disjoint windows of the file. Ours is `llmcomp export` with a cached skeleton, its seconds
those of divide, permute, fold, calibrate and compress in the report. The peer is nncf.compress_weights on the fp16 IR that optimum-cli makes, its seconds those
inside the call. Folders that are in WORK already are judged, not made again, and keep their seconds; remove a folder's `seconds` if they were disturbed.
Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmcomp.judge import evaluate, load_text

FLAGS = {"awq": "--awq", "scale_estimation": "--scale-estimation", "gptq": "--gptq", "target_correction": "--target-correction"}
OUR_STAGES = ("divide", "permute", "fold", "calibrate", "compress")
PEER_MODEL = """
import json, sys, time
import nncf, numpy as np, openvino as ov
from pathlib import Path
def load(source):
    model = ov.Core().read_model(source + "/openvino_model.xml")
    return model, {n for i in model.inputs for n in i.get_names()}
def data(names, rows):
    return {"dataset": nncf.Dataset([sample(names, r) for r in rows]), "subset_size": len(rows)}
def sample(names, ids):
    x = np.array(ids)[None]
    feed = {"input_ids": x, "attention_mask": np.ones_like(x), "position_ids": np.arange(x.shape[1])[None], "beam_idx": np.zeros(1, np.int32)}
    return {k: v for k, v in feed.items() if k in names}
def save(model, out):
    Path(out).mkdir(parents=True, exist_ok=True)
    ov.save_model(model, out + "/openvino_model.xml", compress_to_fp16=False)
"""
PEER = (
    PEER_MODEL
    + """
source, out, mode, group, methods, rows = json.loads(sys.argv[1])
model, names = load(source)
options = {m: True for m in methods} | (data(names, rows) if methods else {})
started = time.perf_counter()
model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode(mode), ratio=1.0, group_size=group, **options)
seconds = time.perf_counter() - started
save(model, out)
Path(out, "seconds").write_text(str(seconds))
"""
)


def run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]} failed:\n{done.stderr[-2000:]}")


def ours(a: argparse.Namespace, methods: str) -> Path:
    out = a.work / f"{a.checkpoint.name}-{a.format}-{methods}"
    if not out.exists():
        data = ["--dataset", str(a.calibration), "--num-samples", str(a.samples), "--sequence-length", str(a.length)]
        asked = [FLAGS[m] for m in methods.split("+") if m != "plain"]
        command = [sys.executable, "-m", "llmcomp", "export", str(a.checkpoint), str(out), "--weight-format", a.format, "--quiet"]
        command += ["--group-size", str(a.group), "--verify", "none", "--no-tokenizer", *asked, *(data if asked else [])]
        # A first run without data makes the skeleton.
        run([*command[:5], str(out) + "-skeleton", "--weight-format", "int4", "--no-tokenizer", "--overwrite"], cache(a))
        run(command, cache(a))
        seconds = json.loads((out / "report.json").read_text(encoding="utf8"))["seconds"]
        (out / "seconds").write_text(str(sum(seconds.get(stage, 0.0) for stage in OUR_STAGES)))
    return out


def cache(a: argparse.Namespace) -> dict[str, str]:
    return {"LLMCOMP_CACHE": str(a.work / "cache")}


def peer(a: argparse.Namespace, methods: str, rows: list[list[int]]) -> Path:
    fp16, out = a.work / f"{a.checkpoint.name}-fp16", a.work / f"{a.checkpoint.name}-{a.format}-nncf-{methods}"
    if not out.exists():
        asked = [m for m in methods.split("+") if m != "plain"]
        run([sys.executable, "-c", PEER, json.dumps([str(fp16), str(out), a.format, a.group, asked, rows])])
    return out


def token_rows(a: argparse.Namespace) -> list[list[int]]:
    """The rows that ours takes, by the same function."""
    from llmcomp import checkpoint
    from llmcomp.calibration import samples_of
    from llmcomp.options import ExportOptions

    data = {"dataset": str(a.calibration), "num_samples": a.samples, "sequence_length": a.length}
    options = ExportOptions(model=str(a.checkpoint), output=a.work, awq=True, **data)
    return [row.tolist() for row in samples_of(options, checkpoint.open(str(a.checkpoint))).rows]


def common_arguments(description: str | None) -> argparse.ArgumentParser:
    """What every comparison with NNCF is asked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--results", type=Path, default=Path("evaluation/results"))
    return parser


def fp16_of(a: argparse.Namespace) -> Path:
    """The float IR that NNCF takes and all are judged against, made where it is missing."""
    folder: Path = a.work / f"{a.checkpoint.name}-fp16"
    if not folder.exists():
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        run([str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", str(a.checkpoint), *task, str(folder)])
    return folder


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--format", default="int4_sym")
    parser.add_argument("--methods", nargs="+", default=["awq+scale_estimation", "awq+scale_estimation+gptq"])
    parser.add_argument("--peer", nargs="*", default=["awq+scale_estimation"])
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    fp16 = fp16_of(a)
    rows = token_rows(a)
    folders = {f"llmcomp {m}": ours(a, m) for m in a.methods} | {f"nncf {m}": peer(a, m, rows) for m in a.peer}
    target = a.results / f"calibrated-{a.checkpoint.name}.json"
    table: dict[str, Any] = json.loads(target.read_text(encoding="utf8")) if target.exists() else {}
    paths = [str(folder) for folder in folders.values()]
    found = evaluate(paths, load_text(str(a.text)), reference=str(fp16), tokenizer=str(a.checkpoint), limit=a.windows)[1:]
    for (name, folder), scores in zip(folders.items(), found, strict=True):
        row = {
            "kl": scores.kl,
            "kl_se": scores.kl_standard_error,
            "perplexity": scores.perplexity,
            "bytes": (folder / "openvino_model.bin").stat().st_size,
            "seconds": float((folder / "seconds").read_text()) if (folder / "seconds").exists() else None,
        }
        table.setdefault(a.format, {})[name] = row
        print(a.format, name, {k: round(v or 0.0, 5) for k, v in row.items()}, flush=True)
        target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
