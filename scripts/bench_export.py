"""Time and memory of a whole export beside the peer's, in one run on one machine; writes evaluation/results/export-NAME.json.

    python scripts/bench_export.py CHECKPOINT WORK_FOLDER [--group-size 64] [--rounds 3]

Four things are timed, all with a warm page cache, in turn:
  ours first        llmcomp export, empty skeleton cache
  ours cached       llmcomp export again
  peer export       optimum-cli export openvino, same format
  peer compression  nncf.compress_weights on the peer's own fp16 IR (the seconds inside the call)
Ours reports the seconds from the first weight byte read to the last .bin byte written ("compress" in report.json).
Ratios are medians over the rounds. Needs room for the fp16 IR. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

PEER = """
import sys, time
import nncf, openvino as ov
model = ov.Core().read_model(sys.argv[1] + "/openvino_model.xml")
started = time.perf_counter()
nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=int(sys.argv[2]), ratio=1.0)
print("seconds", time.perf_counter() - started)
"""


def timed(command: list[str], env: dict[str, str] | None = None) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return time.perf_counter() - started, done.stdout


def warm(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def ours(checkpoint: Path, work: Path, group: int, cache: Path) -> tuple[float, float]:
    out = work / "ours"
    options = ["--weight-format", "int4", "--sym", "--group-size", str(group), "--verify", "structure", "--quiet", "--overwrite"]
    wall, _ = timed([sys.executable, "-m", "llmcomp", "export", str(checkpoint), str(out), *options], {"LLMCOMP_CACHE": str(cache)})
    return wall, json.loads((out / "report.json").read_text())["seconds"]["compress"]


def peer(checkpoint: Path, work: Path, group: int) -> float:
    shutil.rmtree(work / "peer", ignore_errors=True)
    options = ["--task", "text-generation-with-past", "--weight-format", "int4", "--sym", "--group-size", str(group), "--ratio", "1.0"]
    command = [
        str(Path(sys.executable).with_name("optimum-cli")),
        "export",
        "openvino",
        "-m",
        str(checkpoint),
        *options,
        str(work / "peer"),
    ]
    return timed(command)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("evaluation/results"))
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    fp16 = a.work / "fp16"
    if not fp16.exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", str(a.checkpoint)]
        timed([*command, "--task", "text-generation-with-past", "--weight-format", "fp16", str(fp16)])
    rounds = []
    for _ in range(a.rounds):
        cache = a.work / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        warm(a.checkpoint)
        first, _ = ours(a.checkpoint, a.work, a.group_size, cache)
        cached, compress = ours(a.checkpoint, a.work, a.group_size, cache)
        peer_wall = peer(a.checkpoint, a.work, a.group_size)
        _, output = timed([sys.executable, "-c", PEER, str(fp16), str(a.group_size)])
        peer_compress = float(output.rsplit("seconds", 1)[1])
        rounds.append({"first": first, "cached": cached, "compress": compress, "peer_export": peer_wall, "peer_compress": peer_compress})
        print({k: round(v, 2) for k, v in rounds[-1].items()}, flush=True)
    ratios = {
        "compress / peer compress": statistics.median(r["compress"] / r["peer_compress"] for r in rounds),
        "first / peer export": statistics.median(r["first"] / r["peer_export"] for r in rounds),
        "cached / peer export": statistics.median(r["cached"] / r["peer_export"] for r in rounds),
    }
    print({k: round(v, 3) for k, v in ratios.items()})
    result = {
        "command": " ".join(["python", "scripts/bench_export.py", a.checkpoint.name, "WORK", "--group-size", str(a.group_size)]),
        "cpu": next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
        if Path("/proc/cpuinfo").exists()
        else platform.processor(),
        "cores": os.cpu_count(),
        "rounds": rounds,
        "ratios": ratios,
    }
    a.results.mkdir(parents=True, exist_ok=True)
    (a.results / f"export-{a.checkpoint.name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
