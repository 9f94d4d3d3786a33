"""A run that is killed and resumed ends as one that is not, to the bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from llmcomp.errors import OutputError, TrainingError
from llmcomp.training import state
from llmcomp.training.distill import train
from llmcomp.training.objectives import Distillation
from llmcomp.training.tracker import read_log
from tests.training.apart import apart
from tests.training.killed import training
from tests.training.models import cached, one_group, rows, settings, student

MORE: dict[str, Any] = {"steps": 14, "save_every": 4, "eval_every": 3}


def run(folder: Path, kill: int = 0, resume: bool = False, **more: Any) -> int:
    return apart(training, folder, kill, resume, {**MORE, **more})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(folder) == 0
    return folder


def last(folder: Path) -> dict[str, Any]:
    found = state.newest(folder)
    assert found is not None
    return load_file(found / state.TENSORS)


def without_seconds(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder / "log.jsonl")]


# Behind a state and an evaluation; just at a state, whose evaluation was before; before there is any; while the second, or the last, is written.
@pytest.mark.parametrize("kill", [10, 12, 2, -2, -4])
def test_it_ends_to_the_bit_as_an_undisturbed_one(undisturbed: Path, tmp_path: Path, kill: int) -> None:
    folder = tmp_path / "run"
    assert run(folder, kill) == -signal.SIGKILL
    assert run(folder, resume=True) == 0
    expected, found = last(undisturbed), last(folder)
    assert expected.keys() == found.keys() and len(found) == 21
    for name, tensor in expected.items():
        assert tensor.equal(found[name]), name
    assert without_seconds(folder) == without_seconds(undisturbed)
    assert state.best_of(folder) == state.best_of(undisturbed)


def test_a_state_that_was_not_finished_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "state.partial").mkdir()
    for step in (8, 12, 100):
        (tmp_path / f"state-{step:08d}").mkdir()
    assert state.newest(tmp_path) == tmp_path / "state-00000100"


def again(folder: Path, resume: bool = True, **more: Any) -> Any:
    r, h = rows(12), rows(4, 1)
    given = settings(**{**MORE, **more})
    return train(
        student(attention_dropout=0.1), one_group, Distillation(r, h, cached(folder.parent / "c", r, h)), given, folder, None, resume
    )


def test_a_finished_one_stays_as_it_is(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    before = without_seconds(folder)
    result = again(folder)
    assert (result.steps, result.stopped) == (14, "budget")
    assert without_seconds(folder) == before


def test_one_that_began_is_not_overwritten(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    with pytest.raises(OutputError, match="a training run has begun here"):
        again(folder, resume=False)


def test_other_settings_are_refused_by_name(undisturbed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    with pytest.raises(TrainingError, match="it began with seed 0, and is to go on with 1"):
        again(folder, seed=1)


def test_another_student_is_refused_by_name(undisturbed: Path, tmp_path: Path) -> None:
    path = undisturbed / "best" / state.TENSORS
    with pytest.raises(TrainingError, match=r"lm_head.weight is \(96, 32\), and not trainable in the student"):
        state.load_tensors(path, state.trainable(student(trainable="model")))


def test_seconds_go_on_with_what_is_left(tmp_path: Path) -> None:
    """To the bit is not promised; that the best on disk is the best told, and that the clock counts what was before, is."""
    folder = tmp_path / "run"
    more = {"steps": None, "seconds": 3.0, "save_every": 2}
    assert run(folder, 5, **more) == -signal.SIGKILL
    before = max(line["seconds"] for line in read_log(folder / "log.jsonl") if "seconds" in line)
    result = again(folder, **more)
    assert before < result.seconds and 2.0 < result.seconds < 4.0
    assert state.best_of(folder) == (result.best_step, result.best_loss, [])
