"""`llmcomp distill`, from a checkpoint to the IR of what has been trained, killed and resumed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmcomp.cli import main
from tests.test_path import logits
from tests.tiny import tiny_llama

TEXT = " ".join(f"number {i} is followed by {i + 1}, and {i * 7 % 13} is another one." for i in range(900))
ARGUMENTS = [
    "--group-size",
    "32",
    "--awq",
    "--num-samples",
    "4",
    "--sequence-length",
    "64",
    "--train-length",
    "64",
    "--rank",
    "4",
    "--batch-rows",
    "4",
    "--eval-every",
    "4",
    "--save-every",
    "2",
    "--lr",
    "0.01",
]


@pytest.fixture(autouse=True, scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_cache: None) -> Path:
    made = tmp_path_factory.mktemp("distill")
    tiny_llama(made / "m")
    (made / "text.txt").write_text(TEXT)
    return made


def command(folder: Path, out: str, *more: str) -> list[str]:
    return [
        "distill",
        str(folder / "m"),
        str(folder / out),
        "--dataset",
        str(folder / "text.txt"),
        *ARGUMENTS,
        "--train-tokens",
        "3072",
        "--quiet",
        *more,
    ]


def test_what_is_trained_is_exported(folder: Path) -> None:
    """The IR has the codes of the best state of the log, which is no longer the start."""
    assert main(command(folder, "whole")) == 0
    log = [json.loads(line) for line in (folder / "whole" / "training" / "run" / "log.jsonl").read_text().splitlines()]
    judged = [line["kl"] for line in log if "kl" in line]
    assert min(judged) < judged[0]
    assert main(["export", str(folder / "whole"), str(folder / "ir"), "--weight-format", "keep", "--quiet"]) == 0
    ids = np.arange(1, 18)[None]
    start, trained = (logits(folder / where / "openvino_model.xml", ids) for where in ("whole/training/start", "ir"))
    assert np.isfinite(trained).all() and np.abs(trained - start).max() > 1e-3 * np.abs(start).max()


@pytest.mark.longest
def test_a_killed_run_ends_as_an_undisturbed_one(folder: Path) -> None:
    """By the command line, each in a process of its own."""
    run = [sys.executable, "-m", "llmcomp"]
    subprocess.run([*run, *command(folder, "undisturbed")], check=True, timeout=300)
    process = subprocess.Popen([*run, *command(folder, "killed")])
    states, deadline = folder / "killed" / "training" / "run", time.monotonic() + 300
    while not list(states.glob("state-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "killed" / "config.json").exists()
    subprocess.run([*run, *command(folder, "killed", "--resume")], check=True, timeout=300)
    for name in ("model.safetensors", "config.json", "adapter/adapter_model.safetensors"):
        assert (folder / "killed" / name).read_bytes() == (folder / "undisturbed" / name).read_bytes(), name


@pytest.mark.longest
def test_ranks_are_searched_for_on_completions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From two columns to the IR; the adapters that are left have the ranks that were found, within the middle's cost."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"q": f"number {i} is followed by", "a": f" {i + 1}"}) + "\n" for i in range(60)))
    arguments = [a for a in command(folder, "task", "--train", "nls", "--ranks", "2,8,4", "--search-evaluations", "24") if a != "--quiet"]
    arguments = arguments[: (at := arguments.index("--rank"))] + arguments[at + 2 :]
    task = ["--loss", "task", "--train-dataset", str(pairs), "--prompt-column", "q", "--completion-column", "a", "--passes", "4"]
    assert main([*arguments, *task]) == 0
    assert "held-out cross-entropy" in capsys.readouterr().out
    run, adapter = folder / "task" / "training" / "run", folder / "task" / "adapter"
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    judged = [line["cross_entropy"] for line in log if "cross_entropy" in line]
    assert min(judged) < judged[0] and sum("search" in line for line in log) == 1
    assert not (folder / "task" / "training" / "teacher").exists()
    shapes = {name: tensor.shape for name, tensor in load_file(adapter / "adapter_model.safetensors").items()}
    told = json.loads((adapter / "adapter_config.json").read_text())
    parts = {name.removesuffix(".lora_A.weight").removeprefix("base_model.model.") for name in shapes if name.endswith("lora_A.weight")}
    ranks = {name: shapes[f"base_model.model.{name}.lora_A.weight"][0] for name in parts}
    assert len(set(ranks.values())) > 1 and set(ranks.values()) <= {2, 4, 8}
    assert told["rank_pattern"] == {name: rank for name, rank in ranks.items() if rank != told["r"]}
    sides = {
        name: shapes[f"base_model.model.{name}.lora_A.weight"][1] + shapes[f"base_model.model.{name}.lora_B.weight"][0] for name in parts
    }
    assert sum(ranks[name] * sides[name] for name in parts) <= 4 * sum(sides.values())
    assert main(["export", str(folder / "task"), str(folder / "task-ir"), "--weight-format", "keep", "--quiet"]) == 0
    ids = np.arange(1, 18)[None]
    start, trained = (logits(folder / where / "openvino_model.xml", ids) for where in ("task/training/start", "task-ir"))
    assert np.isfinite(trained).all() and np.abs(trained - start).max() > 1e-3 * np.abs(start).max()


def test_what_cannot_be_trained_is_said_before_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = folder / "short.txt"
    short.write_text("a few words")
    nls = command(folder, "no", "--train", "nls")
    nls = nls[: (at := nls.index("--rank"))] + nls[at + 2 :]
    for arguments, told in (
        (command(folder, "no", "--train-dataset", str(short)), "one to train on and one to judge by"),
        (command(folder, "no", "--resume"), "there is no training to go on with"),
        (command(folder, "no", "--rank", "0"), "--rank"),
        (command(folder, "no", "--ranks", "8,4"), "it is of --train nls, and --train is lora"),
        (command(folder, "no", "--train", "nls"), "it is of --train lora, and --train is nls"),
        ([*nls, "--ranks", "8,8"], "--ranks 8,8: a search needs two or more, all different"),
        ([*nls, "--ranks", "8,x"], "--ranks"),
        (command(folder, "no", "--prompt-column", "q"), "it is of --loss task, and --loss is kl"),
        (command(folder, "no", "--loss", "task"), "a .txt has no columns"),
        (["distill", str(folder / "m"), str(folder / "no"), "--quiet"], "it needs text"),
        (["distill", str(folder / "m"), str(folder / "m"), "--dataset", str(folder / "text.txt"), "--awq"], "it exists"),
    ):
        assert main(arguments) != 0
        assert told in capsys.readouterr().err
        assert not (folder / "no").exists()


def test_a_budget_that_no_ranks_fit_is_said_before_the_teacher_reads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nls = command(folder, "none-fits", "--train", "nls", "--rank-budget", "10")
    nls = nls[: (at := nls.index("--rank"))] + nls[at + 2 :]
    assert main(nls) != 0
    assert "rank 8 everywhere has" in capsys.readouterr().err
    assert not (folder / "none-fits" / "training" / "teacher").exists()


def test_a_dry_run_tells_what_training_needs(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(folder, "dry", "--dry-run")) == 0
    told = capsys.readouterr()
    # 3072 / 64 rows and 16 held out, four in a step; of each token 64 log-probabilities f16 and ids u16, and a tail.
    assert "48 to train on and 16 held out, of 64 tokens; 12 steps" in told.out
    assert f"{64 * 64 * (64 * 4 + 4) / 2**20:,.1f} MiB are the teacher's answers" in told.out
    assert "AdamW's moments" in told.out and "warning" not in told.err
    assert not (folder / "dry").exists()
    monkeypatch.setattr("llmcomp.training.forecast.BASE_BYTES", 1 << 60)
    assert main(command(folder, "dry", "--dry-run")) == 0
    assert "warning: memory: about 1,099,511,6" in capsys.readouterr().err and not (folder / "dry").exists()


PEAK = """
import sys, threading, time
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
from llmcomp.cli import main
code = main(sys.argv[1:])
print("peak", peak)
sys.exit(code)
"""


@pytest.mark.longest
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell anonymous memory")
def test_the_forecast_is_what_is_measured(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Within 15 %, half of it the interpreter with its libraries, the other half weights, activations and states."""
    tiny_llama(folder / "wide", hidden_size=768, intermediate_size=3072, head_dim=128, num_hidden_layers=4)
    asked = [*command(folder, "measured", "--train-length", "256", "--held-out-rows", "2")]
    asked[1] = str(folder / "wide")
    assert main([*asked, "--dry-run"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("memory"))
    forecast = float(line.split()[2].replace(",", "")) * 2**20
    run = subprocess.run([sys.executable, "-c", PEAK, *asked], capture_output=True, text=True, check=True, timeout=600)
    measured = int(run.stdout.split("peak ")[1])
    assert 0.85 * measured < forecast < 1.15 * measured
