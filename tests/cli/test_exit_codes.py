"""What a finished or refused export exits with, and what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcomp import errors
from llmcomp.cli import main
from llmcomp.export import export
from llmcomp.judge import JudgeError
from llmcomp.options import ExportOptions
from tests.tiny import tiny_llama

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of which no group of 32 divides the 176 inputs of down_proj, 22 % of the weights that are to get four bits."""
    folder = tmp_path_factory.mktemp("codes")
    tiny_llama(folder / "m", intermediate_size=176)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(folder / "cache"))
        yield folder


def command(source: Path, out: Path, *more: str) -> list[str]:
    return ["export", str(source / "m"), str(out), "--group-size", "32", "--no-tokenizer", "--verify", "structure", "--quiet", *more]


def test_less_than_the_share_is_partly_and_more_is_not(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(command(source, out)) == 13 == errors.PARTLY
    told = capsys.readouterr().err
    share = 1 - 2 * 96 * 176 / json.loads((out / "report.json").read_text())["share"]["wanted"]
    assert "partly: the model is complete (bytes match their checksums; " in told and f"but {100 * share:.1f} % of the weights" in told
    assert "2 layers fell back, model.layers.0.mlp.down_proj to int8_asym for one (32 does not divide 176" in told
    assert (out / "openvino_model.xml").is_file() and not (tmp_path / "out.partial").exists()
    assert main(command(source, out, "--overwrite", "--min-share", f"{share - 0.001}")) == 0
    assert "partly" not in capsys.readouterr().err
    # To the weight, not to the digits of a percentage.
    assert main(command(source, out, "--overwrite", "--min-share", "1")) == 13
    # What an override says is what is asked for.
    assert main(command(source, out, "--overwrite", "--min-share", "1", "--override", "*.down_proj=int8_asym")) == 0


def test_from_python_a_shortfall_is_in_the_report(source: Path, tmp_path: Path) -> None:
    options = ExportOptions(model=str(source / "m"), output=tmp_path / "out", group_size=32, no_tokenizer=True, verify="none")
    share = export(options).report["share"]
    assert share["value"] == pytest.approx(share["reached"] / share["wanted"]) and share["value"] < 0.9


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_nothing_is_refused_before_the_work(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dry: list[str]) -> None:
    assert main(command(source, tmp_path / "out", "--group-size", "128", "--group-size-fallback", "ignore", *dry)) == 12
    told = capsys.readouterr().err
    assert "int4_asym: no layer can get it: model.layers.0.self_attn.q_proj would get keep (128 does not divide 96)" in told
    assert not list(tmp_path.iterdir())


def test_a_model_that_could_not_be_judged_is_there_and_not_0(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise JudgeError("was memory short?")

    monkeypatch.setattr("llmcomp.judging.evaluate", no_memory)
    assert main(command(source, tmp_path / "out", "--min-share", "0", "--eval")) == errors.NOT_JUDGED
    told = capsys.readouterr().err
    assert "warning: not judged: was memory short?" in told and "not judged: the model is complete" in told
    assert (tmp_path / "out" / "report.json").is_file()


def test_every_kind_of_trouble_has_a_code_that_the_readme_names() -> None:
    def below(kind: type[errors.LlmcompError]) -> Iterator[type[errors.LlmcompError]]:
        yield kind
        for one in kind.__subclasses__():
            yield from below(one)

    codes = {kind.__name__: kind.exit_code for kind in below(errors.LlmcompError) if kind.__module__ == errors.__name__}
    assert {codes[name] for name in ("DiskSpaceError", "NothingCompressedError", "BudgetError", "OutputError", "OptionError")} == {
        11,
        12,
        9,
        3,
        2,
    }
    (line,) = [paragraph for paragraph in README.read_text(encoding="utf8").split("\n\n") if paragraph.startswith("Exit codes:")]
    named = {int(number) for number in re.findall(r"(?<![\d.-])(\d+)(?![\d.%])", line)}
    assert {*codes.values(), errors.PARTLY, errors.NOT_JUDGED} - {1} <= named
