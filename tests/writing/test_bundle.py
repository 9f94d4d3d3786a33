from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmcomp.errors import DiskSpaceError, OutputError
from llmcomp.writing.bundle import MARKER, bundle, check_disk, check_output


def test_the_folder_appears_complete(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with bundle(out, False) as folder:
        (folder / "a").write_text("1")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_or_not_at_all(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), bundle(tmp_path / "deep" / "out", False) as folder:
        (folder / "a").write_text("1")
        raise error
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_an_earlier_output_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("old")
    with pytest.raises(RuntimeError), bundle(out, True):
        raise RuntimeError
    assert (out / "report.json").read_text() == "old"
    with bundle(out, True) as folder:
        (folder / "report.json").write_text("new")
    assert (out / "report.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_unfinished_output_is_replaced_but_a_folder_of_the_users_is_not(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine").write_text("1")
    with pytest.raises(OutputError, match=r"out\.partial"):
        check_output(tmp_path / "out", "hub/id", False)
    (partial / MARKER).write_text("")
    check_output(tmp_path / "out", "hub/id", False)


def test_refusals(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for out in (source, tmp_path):
        with pytest.raises(OutputError, match="input"):
            check_output(out, str(source), True)
    with pytest.raises(OutputError, match="exists"):
        check_output(source, "hub/id", False)
    with pytest.raises(OutputError, match="no exported model"):
        check_output(source, "hub/id", True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="not a folder"):
        check_output(tmp_path / "file" / "out", "hub/id", False)
    link = tmp_path / "link"
    link.symlink_to(source)
    with pytest.raises(OutputError, match="input"):
        check_output(link, str(source), True)


def test_too_little_disk_is_told_in_figures(tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match=r"needs \d+ MiB and \d+ MiB are free"):
        check_disk(tmp_path / "deep" / "out", 1 << 60)
    check_disk(tmp_path / "out", 1)


def test_a_disk_that_fills_up_meanwhile_is_told_as_such(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EFBIG):
        with pytest.raises(DiskSpaceError, match="took no more"), bundle(tmp_path / "out", False):
            raise OSError(number, os.strerror(number))
    with pytest.raises(FileNotFoundError), bundle(tmp_path / "out", False):
        raise FileNotFoundError(errno.ENOENT, "gone")
    assert not list(tmp_path.iterdir())
