"""Two processes do what one does with twice the batch."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmcomp.errors import TrainingError
from llmcomp.training import state
from llmcomp.training.processes import join
from llmcomp.training.tracker import read_log
from tests.training.apart import together
from tests.training.two import main, one_of_two, one_of_two_searching, searched_task


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_processes_are_one_with_twice_the_batch_also_when_resumed(tmp_path: Path) -> None:
    # Microbatches of two and one.
    batch = 3
    two, one = tmp_path / "two", tmp_path / "one"
    port = free_port()
    assert together(one_of_two, [(rank, port, two, batch) for rank in range(2)]) == [0, 0]
    assert len(list(two.glob("interrupted-?"))) == 2
    main(one, 2 * batch, False)
    curves = [
        [(line["step"], line.get("loss", line.get("kl")), line.get("tokens")) for line in read_log(f / "run" / "log.jsonl")]
        for f in (one, two)
    ]
    assert [c[0] for c in curves[0]] == [0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 8]
    assert [(c[0], c[2]) for c in curves[0]] == [(c[0], c[2]) for c in curves[1]]
    norms = [[line["norm"] for line in read_log(f / "run" / "log.jsonl") if "norm" in line] for f in (one, two)]
    # Adam does not see a factor in its gradients; the norm before clipping does.
    assert norms[1] == pytest.approx(norms[0], rel=1e-2) and norms[1][0] == pytest.approx(norms[0][0], rel=1e-5)
    # Sums in another order; Adam makes steps of the same size of tiny gradients, so that it grows.
    assert [c[1] for c in curves[1]] == pytest.approx([c[1] for c in curves[0]], rel=1e-3)
    assert [c[1] for c in curves[1][:2]] == pytest.approx([c[1] for c in curves[0][:2]], rel=1e-6)
    assert {path.name for path in (two / "run" / "state-00000008").glob("random*")} == {"random_states_0.pkl", "random_states_1.pkl"}
    a, b = (load_file(f / "run" / "state-00000008" / state.TENSORS) for f in (one, two))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 3e-4
    assert torch.cat([(a[n] - b[n]).flatten() for n in a]).abs().mean() < 1e-5


def test_two_processes_search_as_one_does(tmp_path: Path) -> None:
    """The mean is over the tokens of both, which have different numbers of them; both go on with the ranks that were found."""
    two, one = tmp_path / "two", tmp_path / "one"
    port = free_port()
    assert together(one_of_two_searching, [(rank, port, two, 3) for rank in range(2)]) == [0, 0]
    searched_task(one, 6)
    logs = [read_log(f / "run" / "log.jsonl") for f in (one, two)]
    assert [line.get("tokens") for line in logs[0]] == [line.get("tokens") for line in logs[1]]
    before = [[line["norm"] for line in log if "norm" in line][:4] for log in logs]
    # Sums in another order, which Adam makes more of with each step; what is found may hang on a last bit.
    assert before[0] == pytest.approx(before[1], rel=1e-3) and before[0][0] == pytest.approx(before[1][0], rel=1e-5)
    found = [next(line for line in log if "search" in line) for log in logs]
    assert found[0]["start"] == pytest.approx(found[1]["start"], rel=1e-4) and [line["search"] for line in found] == [12, 12]


def test_a_process_that_has_lost_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    join()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="2 processes were started, of which this one sees 1"):
        join()
