"""Time of the compression stage for every format beside nncf.compress_weights, in one run; writes evaluation/results/formats-NAME.json.

    python scripts/bench_formats.py CHECKPOINT WORK_FOLDER [--formats int8_asym int4_sym ...] [--rounds 3]

Ours is the seconds of `fold` and `compress` in report.json: from the first weight byte read to the last .bin byte written, with the default
options of each format. The peer is the seconds inside nncf.compress_weights on its own fp16 IR, in memory; its models are not saved, while
ours are on disk. Both with a warm page cache, in turn. Formats that the peer lacks are timed alone. Results of
earlier runs for other formats stay in the file. "of copy" is the time of copying the
checkpoint's bytes in memory, on all cores, over ours. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench_export import timed, warm

from llmcomp import formats

TOUCHED = 3 << 30
"""Bytes: about what either side needs beside the mapped checkpoint."""

PEER = """
import sys, time
import nncf, openvino as ov
model = ov.Core().read_model(sys.argv[1] + "/openvino_model.xml")
options = {"ratio": 1.0} if not sys.argv[2].startswith("int8") else {}
if sys.argv[3] != "-1":
    options["group_size"] = int(sys.argv[3])
started = time.perf_counter()
nncf.compress_weights(model, mode=nncf.CompressWeightsMode(sys.argv[2]), **options)
print("seconds", time.perf_counter() - started)
"""


def ours(checkpoint: Path, work: Path, name: str) -> float:
    out = work / "ours"
    options = ["--weight-format", name, "--verify", "none", "--no-tokenizer", "--quiet", "--overwrite"]
    timed([sys.executable, "-m", "llmcomp", "export", str(checkpoint), str(out), *options], {"LLMCOMP_CACHE": str(work / "cache")})
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    return float(seconds.get("fold", 0.0) + seconds["compress"])


def peer(fp16: Path, name: str, group: int) -> float | None:
    """None if the peer does not know the format."""
    command = [sys.executable, "-c", PEER, str(fp16), name, str(group)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "is not a valid CompressWeightsMode" in done.stderr:
            return None
        raise SystemExit(f"the peer failed on {name}:\n{done.stderr[-2000:]}")
    return float(done.stdout.rsplit("seconds", 1)[1])


def settle() -> None:
    """Before either side runs: what was written before is on the disk, and the memory that will be asked for is there.

    A virtual machine gets memory from its host when it is first touched, at 2 s a GB on the machine these figures are of, and may lose it again
    when it lies idle. Whichever side came first would pay.
    """
    os.sync()
    subprocess.run([sys.executable, "-c", f"import numpy; numpy.empty({TOUCHED}, numpy.uint8)[::4096] = 1"], check=True)


def copy_seconds(checkpoint: Path) -> float:
    """Seconds for copying as many bytes as the checkpoint has, in memory, on all cores."""
    total = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    workers = os.cpu_count() or 1
    source, target = np.ones((workers, 1 << 26), np.uint8), np.zeros((workers, 1 << 26), np.uint8)
    rounds = max(1, total // source.size)
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda i: np.copyto(target[i % workers], source[i % workers]), range(rounds * workers)))
    return (time.perf_counter() - started) * total / (rounds * source.size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--formats", nargs="+", default=list(formats.names()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("evaluation/results"))
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    fp16 = a.work / "fp16"
    if not fp16.exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "-m", str(a.checkpoint)]
        timed([*command, "--task", "text-generation-with-past", "--weight-format", "fp16", str(fp16)])
    ours(a.checkpoint, a.work, "int4_sym")
    a.results.mkdir(parents=True, exist_ok=True)
    target = a.results / f"formats-{a.checkpoint.name}.json"
    rows: dict[str, dict[str, Any]] = json.loads(target.read_text(encoding="utf8"))["formats"] if target.exists() else {}
    for name in a.formats:
        group, mine, theirs = formats.get(name).group_size, [], []
        for _ in range(a.rounds):
            warm(a.checkpoint)
            settle()
            mine.append(ours(a.checkpoint, a.work, name))
            settle()
            seconds = peer(fp16, name, group)
            theirs += [] if seconds is None else [seconds]
        row: dict[str, Any] = {
            "rounds": a.rounds,
            "group_size": group,
            "ours": statistics.median(mine),
            "all": mine,
            "of_copy": copy_seconds(a.checkpoint) / statistics.median(mine),
        }
        if theirs:
            row |= {"peer": statistics.median(theirs), "peer_all": theirs, "ratio": statistics.median(mine) / statistics.median(theirs)}
        rows[name] = row
        print(name, {k: round(v, 3) for k, v in row.items() if isinstance(v, float)}, flush=True)
        command = f"python scripts/bench_formats.py {a.checkpoint.name} WORK --formats FORMAT --rounds ROUNDS"
        result = {"command": command, "cores": os.cpu_count(), "formats": rows}
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
