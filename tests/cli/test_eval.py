from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmcomp.cli import eval as command
from llmcomp.cli import main
from tests.judge.irs import bigram, table


def test_piped_output_is_a_line_per_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, folder = bigram(tmp_path / "p", table(0)), bigram(tmp_path / ("[red]" + "long" * 50), table(1))
    scores = tmp_path / "scores.json"
    assert main(["eval", folder, "--reference", reference, "--window", "16", "--windows", "3", "--json", str(scores)]) == 0
    first, second, note = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{reference}: ppl=") and " kl=" not in first
    size = Path(folder, "openvino_model.bin").stat().st_size
    assert second.startswith(f"{folder}: ppl=") and f"bin_bytes={size} bin_mib=0.4" in second
    assert "3 windows of 16 tokens, stride 16, no BOS" in note and "KL" in note
    record = json.loads(scores.read_text())
    assert [s["name"] for s in record["scores"]] == [reference, folder]
    got = record["scores"][1]
    assert f"kl={got['kl']:.5f} kl_se={got['kl_standard_error']:.5f} kl_p50={got['kl_percentiles']['50']:.5f}" in second
    assert sum(got["window_kl"]) / 3 == pytest.approx(got["kl"])


def test_a_table_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bigram(tmp_path / "[red]m", table(0))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["eval", folder, "--window", "16", "--windows", "1", "--reference", folder]) == 0
    out = capsys.readouterr().out
    assert "[red]m" in out and "word ppl" in out and "1.0000" in out and "-0.0" not in out


def test_errors_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = bigram(tmp_path / "p", table(0))
    for arguments, words in (
        ([str(tmp_path)], "openvino_model.xml"),
        ([folder, "--json", str(tmp_path / "nowhere" / "s.json")], "nowhere"),
        ([folder, "--text", str(tmp_path / "none.txt")], "no such file"),
        ([folder, "--window", "999999"], "tokens"),
    ):
        assert main(["eval", *arguments]) == 8
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("llmcomp: error: ") == 1 and words in told.err


def test_lines_of_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    with command.Windows() as face:
        for done in range(5):
            face.advance(done, 4)
            now[0] += 20
    assert capsys.readouterr().err.splitlines() == ["4 windows", "2 of 4 windows, about 40 s left"]
