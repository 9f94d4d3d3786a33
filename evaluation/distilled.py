"""Training back what int4 lost: KL before and after on text that nothing was tuned on, beside NNCF's FQ_LORA recipe; into evaluation/results/.

    python evaluation/distilled.py CHECKPOINT WORK --calibration FILE --text FILE [--minutes 30] [--starts awq+scale_estimation plain/scales ...] [--peer]

Ours is `llmcomp distill` from each start, then `llmcomp export --weight-format keep`; start and end are judged as IRs against the float IR. The peer
(peer_fq_lora.py) trains in torch on the same rows for as long, from its own AWQ + scale estimation, and is judged there on the same windows. The last
rows of the calibration text are held out, the windows are of another text. Teachers' answers are made before both clocks start. Folders that are in WORK
already are not made again. Nothing else should run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from calibrated import FLAGS, cache, common_arguments, fp16_of, run
from matplotlib.figure import Figure

from llmcomp.judge import evaluate, load_text

TRAINING = ["--batch-rows", "4", "--eval-every", "25"]
"""As in LOG.md's trials; all else by default."""


def command(a: Any, way: str, out: Path) -> list[str]:
    """`way` is METHODS, or METHODS/TRAIN for another kind of training than adapters."""
    methods, _, train = way.partition("/")
    data = ["--dataset", str(a.calibration), "--num-samples", str(a.samples), "--sequence-length", str(a.length)]
    start = ["--weight-format", "int4_asym", "--group-size", str(a.group), *[FLAGS[m] for m in methods.split("+") if m != "plain"], *data]
    length = ["--train-tokens", str(a.train_tokens), "--minutes", str(a.minutes)]
    return [
        sys.executable,
        "-m",
        "llmcomp",
        "distill",
        str(a.checkpoint),
        str(out),
        *start,
        *length,
        *TRAINING,
        *(["--train", train] if train else []),
    ]


def shared_rows(a: Any) -> tuple[Any, Any]:
    """The rows that `llmcomp distill` takes, by the same function; written for the peer, with the windows of the judge."""
    from transformers import AutoTokenizer

    from llmcomp import checkpoint
    from llmcomp.options import ExportOptions
    from llmcomp.options.train_options import TrainOptions
    from llmcomp.teaching import training_rows

    options = ExportOptions(model=str(a.checkpoint), output=a.work, dataset=str(a.calibration))
    source = checkpoint.open(str(a.checkpoint))
    rows, held_out = training_rows(options, TrainOptions(train_tokens=a.train_tokens), source)
    ids = AutoTokenizer.from_pretrained(a.checkpoint)(a.text.read_text(encoding="utf8"), add_special_tokens=False).input_ids
    windows = np.array(ids[: 512 * a.windows]).reshape(a.windows, 512)
    # The peer calibrates on what ours does: the first rows of the same text.
    for name, value in {"rows": rows, "held-out": held_out, "windows": windows, "calibration": rows[: a.samples]}.items():
        np.save(a.work / f"{name}.npy", value)
    return rows, held_out


def answered(a: Any, rows: Any, held_out: Any) -> Path:
    """The teacher's answers, made once for all starts."""
    from llmcomp import checkpoint
    from llmcomp.options.train_options import TrainOptions
    from llmcomp.training.loading import load_model
    from llmcomp.training.teacher import write_cache

    folder: Path = a.work / "teacher"
    source, by_default = checkpoint.open(str(a.checkpoint)), TrainOptions()
    both = np.concatenate([rows, held_out])
    write_cache(folder, load_model(source), both, source.values_digest(), by_default.top_k, by_default.microbatch_rows)
    return folder


def ours(a: Any, way: str, answers: Path) -> dict[str, Any]:
    out = a.work / f"{a.checkpoint.name}-{way.replace('/', '-')}"
    if not (out / "config.json").exists():
        # A run that is resumed takes the answers that it finds.
        shutil.copytree(answers, out / "training" / "teacher")
        run([*command(a, way, out), "--resume", "--quiet"], cache(a))
    trained = out.with_name(out.name + "-ir")
    if not trained.exists():
        run([sys.executable, "-m", "llmcomp", "export", str(out), str(trained), "--weight-format", "keep", "--quiet"], cache(a))
    log = [json.loads(line) for line in (out / "training" / "run" / "log.jsonl").read_text(encoding="utf8").splitlines()]
    steps = {line["step"]: line["seconds"] for line in log if "seconds" in line}
    paths = [str(out / "training" / "start"), str(trained)]
    reference = str(fp16_of(a))
    _, before, after = evaluate(paths, load_text(str(a.text)), reference=reference, tokenizer=str(a.checkpoint), limit=a.windows)
    return {
        "command": "llmcomp " + " ".join(command(a, way, Path("OUT"))[3:]).replace(str(a.checkpoint), a.checkpoint.name),
        "start_kl": before.kl,
        "kl": after.kl,
        "kl_se": after.kl_standard_error,
        "perplexity": [before.perplexity, after.perplexity],
        "bytes": [(Path(p) / "openvino_model.bin").stat().st_size for p in paths],
        "steps": max(steps),
        "seconds": max(steps.values()),
        "curve": [[steps.get(line["step"], 0.0), line["kl"]] for line in log if "kl" in line],
    }


def peer(a: Any) -> dict[str, Any]:
    if not (a.work / "peer.json").exists():
        script = Path(__file__).with_name("peer_fq_lora.py")
        run([sys.executable, str(script), str(a.checkpoint), str(a.work), "--minutes", str(a.minutes), "--group", str(a.group)])
    return json.loads((a.work / "peer.json").read_text(encoding="utf8"))


def draw(table: dict[str, Any], target: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, row in table.items():
        seconds, kl = zip(*row["curve"], strict=True)
        axes.plot([s / 60 for s in seconds], kl, marker="o", markersize=3, label=name)
    axes.set(xlabel="minutes of training, two cores", ylabel="held-out KL, nats a token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--train-tokens", type=int, default=116736)
    parser.add_argument("--starts", nargs="*", default=["awq+scale_estimation", "awq+gptq+target_correction"])
    parser.add_argument("--peer", action="store_true")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    os.environ["LLMCOMP_CACHE"] = cache(a)["LLMCOMP_CACHE"]
    answers = answered(a, *shared_rows(a))
    target = a.results / f"distilled-{a.checkpoint.name}.json"
    table: dict[str, Any] = json.loads(target.read_text(encoding="utf8")) if target.exists() else {}
    todo = {f"llmcomp from {way}": lambda way=way: ours(a, way, answers) for way in a.starts}
    for name, make in (todo | ({"NNCF FQ_LORA": lambda: peer(a)} if a.peer else {})).items():
        row = table[name] = make()
        row["recovered"] = 1 - row["kl"] / row["start_kl"]
        print(f"{name}: KL {row['start_kl']:.4f} -> {row['kl']:.4f}, {row['recovered']:.1%} less after {row['steps']} steps", flush=True)
        target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf8")
        draw(table, target.with_suffix(".png"))


if __name__ == "__main__":
    main()
