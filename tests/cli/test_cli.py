from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmcomp.cli import main
from llmcomp.cli import progress as faces
from llmcomp.errors import OptionError
from tests.tiny import tiny_llama


def test_help_is_light() -> None:
    """No numpy, no runtime: what `llmcomp --help` imports would be paid at every start."""
    code = (
        "import sys; from llmcomp.cli import main\n"
        "try: main(['export', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'openvino', 'torch', 'pydantic', 'rich', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]") and "--group-size-fallback" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["export"], ["export", "m"], ["nothing"], [], ["export", "m", "o", "--ratio", "x"], ["export", "m", "o", "--frobnicate"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def early(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit code, stderr), and it took less than 5 s."""
    started = time.monotonic()
    code = main(arguments)
    assert time.monotonic() - started < 5
    return code, capsys.readouterr().err


def test_errors_that_are_known_early(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = tmp_path / "good"
    tiny_llama(good, shards=3)
    out = str(tmp_path / "out")
    exists = tmp_path / "exists"
    exists.mkdir()
    (exists / "file").write_text("mine")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("group-sise: 32")

    def refused(code: int, words: str, *arguments: str) -> None:
        got, told = early(list(arguments), capsys)
        assert got == code and told.startswith("llmcomp: error: ") and words in told, told
        assert not Path(out).exists() and not Path(out + ".partial").exists()

    refused(3, "it exists", "export", str(good), str(exists))
    refused(3, "no exported model", "export", str(good), str(exists), "--overwrite")
    refused(3, "it is the input", "export", str(good), str(good), "--overwrite")
    refused(2, "group_size", "export", str(good), out, "--recipe", str(recipe))
    refused(2, "int4", "export", str(good), out, "--weight-format", "int44")
    refused(4, "no such folder", "export", str(tmp_path / "nowhere"), out)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(4, "offline", "export", "some/model", out, "--cache_dir", str(tmp_path / "hub"))
    (good / "model-00002-of-00003.safetensors").rename(tmp_path / "hidden")
    refused(4, "index lists 3 files, 2 present", "export", str(good), out)
    (tmp_path / "hidden").rename(good / "model-00002-of-00003.safetensors")
    shard = good / "model-00003-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    refused(4, "truncated", "export", str(good), out)
    shard.write_bytes(whole)
    (good / "tokenizer.json").unlink()
    refused(4, "--no-tokenizer", "export", str(good), out)
    monkeypatch.setattr("llmcomp.writing.bundle.SPARE", 1 << 60)
    refused(11, "MiB are free", "export", str(good), out, "--no-tokenizer")
    assert (exists / "file").read_text() == "mine"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmcomp.export.export", interrupt)
    assert main(["export", "m", str(tmp_path / "o")]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_inspect_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 4 and "openvino_model.xml" in capsys.readouterr().err
    (tmp_path / "openvino_model.xml").write_text("<net>")
    assert main(["inspect", str(tmp_path)]) == 4 and "not a readable IR" in capsys.readouterr().err


def test_plain_lines_come_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(faces.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    face = faces.Lines(stream)
    face.stage("compress")
    face.start(100, "weights")
    for _ in range(20):
        face.advance(5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "compress ..." and 2 <= len(lines) <= 5 and " %, about" in lines[1] and "s left" in lines[1]


def test_the_bar_prints_what_it_is_told_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        face = faces.Bar(stack)
        face.stage("compress")
        face.start(10, "weights")
        face.advance(4)
        face.layer("model.[/b].0", "int4_sym", 0.5, group_size=64)
        face.progress.columns[0](face.progress.tasks[0])  # what the next refresh draws
        face.note("/a/[red]folder")
        face.warn("careful [/b]")
        assert (face.progress.tasks[0].completed, face.progress.tasks[0].total) == (4, 10)
        face.finish()
    told = capsys.readouterr().out
    assert "  /a/[red]folder\n" in told and "warning: careful [/b]\n" in told


def test_a_plan_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert main(["plan", str(tmp_path / "m"), "--ratio", "0.5", "-o", str(tmp_path / "p.json")]) == 0
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan["main"] == "int4_asym" and plan["summary"]["ratio"] == pytest.approx(0.5, abs=0.05)
    assert main(["plan", str(tmp_path / "m"), "--recipe", "laptop-int4"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["summary"]["ratio"] == 1.0 and "plan ..." in told.err


def test_the_log_is_one_object_a_line_beside_any_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    with faces.make_progress(True, log) as face:
        face.stage("compress")
        face.start(10, "weights")
        face.advance(10)
        face.layer("a", "int4_sym", 0.5, group_size=64, error=0.01)
        face.warn("careful")
        face.finish()
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["event"] for e in events] == ["stage", "start", "layer", "warning", "finish"]
    assert events[2]["done"] == events[2]["total"] == 10 and events[2]["group_size"] == 64
    told = capsys.readouterr()
    assert told.out == "" and "careful" in told.err
    with pytest.raises(OptionError, match="json-log"), faces.make_progress(True, tmp_path / "no" / "log"):
        pass
