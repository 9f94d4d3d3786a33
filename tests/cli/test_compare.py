"""The command on hand-made IRs; the page is read as a browser would, by html.parser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmcomp.cli import main
from llmcomp.comparison import COLUMNS
from tests.judge.irs import bigram, table

SMALL = ["--window", "16", "--windows", "3", "--answer-tokens", "4", "--prompt-tokens", "8", "--speed-tokens", "2", "--repeats", "1"]
NAMES = ("<b>[red]$x_1$&\"'", "plain|two")


class Page(HTMLParser):
    """Tags with attributes, text, and the cells of the table of figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.rows, self._in_figures, self._open = "", [], False, False
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self._in_figures = ("id", "figures") in attributes
        elif tag == "tr" and self._in_figures:
            self.rows.append([])
        elif tag in ("td", "th") and self._in_figures:
            self.rows[-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._in_figures:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A reference and two models; the first of these has a report of ours, the second a file that is none."""
    root = tmp_path_factory.mktemp("models")
    made = [bigram(root / name, table(seed)) for seed, name in enumerate(("reference", *NAMES))]
    layers = [{"name": f"model.layers.{i}.<i>mlp", "format": "int4_sym", "relative_error": 0.01 * (i + 1)} for i in range(4)]
    layers.append({"name": "lm_head", "format": "keep", "relative_error": 0.0})
    report = {"schema": 1, "source": "s", "verified": "v", "layers": layers}
    Path(made[1], "report.json").write_text(json.dumps(report))
    Path(made[2], "report.json").write_text("[1]")
    return made


@pytest.fixture(scope="module")
def compared(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "comparison"
    arguments = ["compare", *folders[1:], "--reference", folders[0], *SMALL, "--output", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["llmcomp", *arguments])
        assert main(arguments) == 0
    return out


def test_page_table_and_json_agree(compared: Path, folders: list[str]) -> None:
    record = json.loads((compared / "compare.json").read_text())
    models = record["models"]
    assert [m["name"] for m in models] == folders and [m["number"] for m in models] == ["ref", "1", "2"]
    assert models[1]["bin_bytes"] == Path(folders[1], "openvino_model.bin").stat().st_size
    wanted = [[m["number"], m["label"], *(c.cell(m) for c in COLUMNS)] for m in models]
    page = Page((compared / "compare.html").read_text())
    assert page.rows[0][:3] == ["", "model", "sizeMiB"] and page.rows[1:] == wanted
    lines = (compared / "compare.md").read_text().splitlines()
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[:5]]
    assert cells[2:] == wanted and cells[0][2] == "size (MiB)" and cells[1] == ["---", "---", *["---:"] * len(COLUMNS)]
    assert models[0]["kl"] is None and models[1]["kl"] > 0 and models[1]["kl_difference"] is None and models[2]["kl_difference"] is not None
    assert all(m["first_token_ms"] > 0 for m in models) and 0 <= models[1]["fdt_norm"] <= 1


def test_the_page_is_complete_in_itself(compared: Path) -> None:
    page = Page((compared / "compare.html").read_text())
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "b", "i"} and {"svg", "figcaption", "style", "title"} <= names
    for _, attributes in page.tags:
        assert all(attributes[key].startswith("#") for key in ("href", "src", "xlink:href") if key in attributes)
    assert "@import" not in page.text and "url(" not in page.text
    for words in (
        "3 windows of 16 tokens from the beginning of Python's help topics: 48 tokens, 45 of which",
        "nats per token",
        "size of openvino_model.bin (MiB)",
        "relative squared error",
        "llmcomp compare",
        "model.layers.3.<i>mlp",
        f"1  {NAMES[0]}",
        f"2  {NAMES[1]}",
    ):
        assert words in page.text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_table(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", folders[1], *SMALL]) == 0
    heading, row, note = capsys.readouterr().out.splitlines()
    assert NAMES[0] in row and "perplexity" in heading and "KL" not in heading and "ms" in heading
    assert note == "Python's help topics: 3 windows of 16 tokens, no BOS"


def test_nothing_is_written_over(compared: Path, folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = (compared / "compare.json").read_text()
    command = ["compare", folders[2], *SMALL, "--output", str(compared)]
    assert main(command) == 3 and "--overwrite" in capsys.readouterr().err
    assert (compared / "compare.json").read_text() == before
    other = compared.parent / "again"
    assert main([*command[:-1], str(other)]) == 0 and main([*command[:-1], str(other), "--overwrite"]) == 0
    # Without a reference the perplexity is the loss, and without a report there is no plot of layers.
    page = (other / "compare.html").read_text()
    assert "KL" not in page and page.count("<svg") == 1 and "Perplexity is how uncertain" in page


def test_errors_are_one_message(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words, code in (
        ([str(tmp_path)], "openvino_model.xml", 8),
        ([folders[1], "--reference", str(tmp_path / "nowhere")], "no such folder", 8),
        ([folders[1], "--prompts", str(tmp_path / "nowhere")], "prompts", 8),
        ([folders[1], "--window", "999999"], "tokens", 8),
        ([folders[1], "--output", str(tmp_path / "no" / "where")], "Make it first", 3),
    ):
        assert main(["compare", *arguments]) == code
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("llmcomp: error: ") == 1 and words in told.err
