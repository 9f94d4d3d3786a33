"""Two processes do what one does with twice the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcomp.training import state
from llmcomp.training.tracker import read_log
from tests.training.two import main


@pytest.mark.parametrize("batch", [3])
def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path, batch: int) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "1"]
    launch += ["--mixed_precision", "no", "--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"]
    launch += ["-m", "tests.training.two", str(two), str(batch)]
    done = subprocess.run(launch, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    main(one, 2 * batch)
    curves = [[(line["step"], line.get("loss", line.get("kl")), line.get("tokens")) for line in read_log(f / "run" / "log.jsonl")] for f in (one, two)]
    assert [c[0] for c in curves[0]] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 8]
    assert [(c[0], c[2]) for c in curves[0]] == [(c[0], c[2]) for c in curves[1]]
    # Sums in another order; Adam makes steps of the same size of tiny gradients, so that it grows.
    assert [c[1] for c in curves[1]] == pytest.approx([c[1] for c in curves[0]], rel=1e-3)
    assert [c[1] for c in curves[1][:2]] == pytest.approx([c[1] for c in curves[0][:2]], rel=1e-6)
    a, b = (load_file(f / "run" / "state-00000008" / state.TENSORS) for f in (one, two))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 3e-4
    assert torch.cat([(a[n] - b[n]).flatten() for n in a]).abs().mean() < 1e-5
