"""A float reference in a child process: what goes wrong with the process. Its figures are in test_evaluate.py."""

from __future__ import annotations

import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from llmcomp.judge import JudgeError, hf_reference
from llmcomp.judge.hf_model import HFModel
from tests.tiny import tiny_llama


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_child_that_is_gone(tmp_path: Path, scratch: Path) -> None:
    tiny_llama(tmp_path / "hf")
    with HFModel(str(tmp_path / "hf"), 4) as model:
        assert model.logits(np.arange(4)).shape == (4, 320) and model.file_bytes == 4 * 4 * 320
        model._child.kill()
        model._child.wait()
        with pytest.raises(JudgeError, match="ended with code"):
            model.logits(np.arange(4))
    assert not list(scratch.iterdir())


def test_a_full_disk_is_told_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hf_reference.shutil, "disk_usage", lambda _: usage(100, 1, 99 << 20))
    with pytest.raises(hf_reference.Refused, match=r"takes 100 MiB .* 99 MiB are free"):
        hf_reference._reserve(tmp_path / "f", 100 << 20)
    assert not (tmp_path / "f").exists()
    hf_reference._reserve(tmp_path / "f", (2 << 20) + 3)
    assert (tmp_path / "f").stat().st_size == (2 << 20) + 3
