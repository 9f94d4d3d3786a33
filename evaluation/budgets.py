"""Plans under a budget side by side with uniform plans and NNCF's: KL on text that nothing saw, bytes; into evaluation/results/budgets-NAME.json.

    python evaluation/budgets.py CHECKPOINT WORK --calibration FILE --text FILE [--bpw 4.6 5.2 6.5] [--windows 24]
        [--peer all|near|none]

Three families, every model judged on the same windows:
  budget   `llmcomp export --target-bpw B`, by losses that `llmcomp measure` has written once
  uniform  one format and group for all layers, with and without `--all-layers`
  ratio    a share of int4 layers by one of NNCF's five metrics, ratio 0.1 to 1 in steps of 0.1, with and without all layers: by NNCF itself, and,
           so that plans are compared and not algorithms, by us
A plan rivals a budget whose .bin has at least its bytes over 1.01. All families round without data (`--method plain`) or with the same
calibrated method. `--peer near` has NNCF itself make, of each metric, only the plans that are next to a budget by the bytes that ours of the same
name have: the smallest ratio that rivals it. What is in the results already is not made again; folders are removed once judged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibrated import FLAGS, PEER_MODEL, cache, common_arguments, fp16_of, run, token_rows

from llmcomp.judge import evaluate, load_text

METRICS = (
    "weight_quantization_error",
    "hessian_input_activation",
    "mean_activation_variance",
    "max_activation_variance",
    "mean_activation_magnitude",
)
UNIFORM = [(name, group) for name in ("int4_sym", "int4_asym") for group in (32, 64, 128)]
PEER = (
    PEER_MODEL
    + """
source, out, mode, group, ratio, metric, all_layers, rows = json.loads(sys.argv[1])
model, names = load(source)
options = data(names, rows) if metric != "weight_quantization_error" else {}
metric = nncf.SensitivityMetric(metric)
mode = nncf.CompressWeightsMode(mode)
model = nncf.compress_weights(model, mode=mode, ratio=ratio, group_size=group, sensitivity_metric=metric, all_layers=all_layers, **options)
save(model, out)
"""
)


TOGETHER = 8
"""Models judged at once, for which the reference runs once."""


def models(a: argparse.Namespace, measured: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and the command that makes it into the folder `{out}`."""
    data = ["--dataset", str(a.calibration), "--num-samples", str(a.samples), "--sequence-length", str(a.length)]
    method = [] if a.method == "plain" else [FLAGS[m] for m in a.method.split("+")] + data
    export = [
        sys.executable,
        "-m",
        "llmcomp",
        "export",
        str(a.checkpoint),
        "{out}",
        "--quiet",
        "--verify",
        "none",
        "--no-tokenizer",
        *method,
    ]
    for bpw in a.bpw:
        yield f"budget {bpw:g}", [*export, "--target-bpw", str(bpw), "--sensitivity", str(measured)]
    for name, group in UNIFORM:
        for all_layers in (False, True):
            switch = ["--all-layers"] if all_layers else []
            yield f"uniform {name} {group}{' all' * all_layers}", [*export, "--weight-format", name, "--group-size", str(group), *switch]
    for metric in METRICS:
        for all_layers in (False, True):
            for tenths in range(1, 11):
                ratio, switch = tenths / 10, ["--all-layers"] if all_layers else []
                told = f"{metric} {ratio:g}{' all' * all_layers}"
                if tenths == 10 and metric != METRICS[0]:
                    continue
                asked = ["--weight-format", a.format, "--group-size", str(a.group), "--ratio", str(ratio), *switch]
                ranked = ["--sensitivity-metric", metric, "--sensitivity", str(measured)] if tenths < 10 else []
                yield f"ratio {told}", [*export, *asked, *ranked]


def peers(a: argparse.Namespace, found: dict[str, dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """As `models`, by NNCF; `found` says what ours have become."""
    rows = token_rows(a)
    for metric in METRICS:
        for switch in ("", " all"):
            ratios = [tenths / 10 for tenths in range(1, 11 if metric == METRICS[0] else 10)]
            # What failed has no bytes and is next to nothing.
            own = {r: row["bytes"] for r in ratios if "bytes" in (row := found[f"ratio {metric} {r:g}{switch}"])}
            limits = [1.01 * row["bytes"] for bpw in a.bpw if "bytes" in (row := found[f"budget {bpw:g}"])]
            near = {min((r for r in own if own[r] <= limit), default=None) for limit in limits}
            for ratio in ratios:
                if a.peer == "all" or ratio in near:
                    given = [str(fp16_of(a)), "{out}", a.format, a.group, ratio, metric, bool(switch), rows]
                    yield f"nncf {metric} {ratio:g}{switch}", [sys.executable, "-c", PEER, json.dumps(given)]


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--bpw", type=float, nargs="+", default=[4.6, 5.2, 6.5])
    parser.add_argument("--method", default="plain", help="plain, or as in calibrated.py, awq+scale_estimation for one")
    parser.add_argument("--format", default="int4_asym", help="of the ratio family")
    parser.add_argument("--peer", choices=["all", "near", "none"], default="all", help="which of its plans NNCF makes itself")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    measured = a.work / f"{a.checkpoint.name}-measured.json"
    if not measured.exists():
        data = ["--dataset", str(a.calibration), "--num-samples", str(a.samples), "--sequence-length", str(a.length)]
        run([sys.executable, "-m", "llmcomp", "measure", str(a.checkpoint), "-o", str(measured), *data], cache(a))
    target = a.results / f"budgets-{a.checkpoint.name}.json"
    table: dict[str, Any] = json.loads(target.read_text(encoding="utf8")) if target.exists() else {}
    found = table.setdefault(a.method, {})
    plans = list(models(a, measured))
    # NNCF's are asked for once ours are known.
    for family in ("ours", "nncf"):
        if family == "nncf":
            plans = list(peers(a, found)) if a.peer != "none" else []
        missing = [one for one in plans if one[0] not in found]
        for part in (missing[i : i + TOGETHER] for i in range(0, len(missing), TOGETHER)):
            found |= judged(a, part)
            target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf8")
    tell(found)


def judged(a: argparse.Namespace, part: list[tuple[str, list[str]]]) -> dict[str, dict[str, Any]]:
    """Makes these models and judges them together."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=a.work) as scratch:
        made = {}
        for i, (name, command) in enumerate(part):
            out = Path(scratch, str(i))
            try:
                run([word.replace("{out}", str(out)) for word in command], cache(a))
                made[name] = out
            except SystemExit as error:
                found[name] = {"failed": str(error)[-300:]}
        options = {"reference": str(fp16_of(a)), "tokenizer": str(a.checkpoint), "limit": a.windows}
        scores = evaluate([str(out) for out in made.values()], load_text(str(a.text)), **options)[1:] if made else []
        for (name, out), one in zip(made.items(), scores, strict=True):
            found[name] = {"kl": one.kl, "kl_se": one.kl_standard_error, "bytes": (out / "openvino_model.bin").stat().st_size}
    for name, row in found.items():
        print(name, row, flush=True)
    return found


def tell(found: dict[str, dict[str, Any]]) -> None:
    """For each budget its best rival of no more than 1.01 times the bytes."""
    for name, own in found.items():
        if not name.startswith("budget") or "kl" not in own:
            continue
        rivals = {n: r for n, r in found.items() if not n.startswith("budget") and "kl" in r and r["bytes"] <= 1.01 * own["bytes"]}
        for family in ("uniform", "ratio", "nncf"):
            best = min((n for n in rivals if n.startswith(family)), key=lambda n: rivals[n]["kl"], default=None)
            if best:
                print(f"{name}: KL {own['kl']:.4f}, {own['bytes']} bytes; best {family} of {len(rivals)}: {best} {rivals[best]}")


if __name__ == "__main__":
    main()
