"""The report of an export, plain and calibrated, against the checkpoint, the folder and numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from llmcomp import formats
from llmcomp.export import export
from llmcomp.graph.layer import Layer
from llmcomp.options import ExportOptions
from llmcomp.planning import make_plan
from llmcomp.writing import fates, report_page
from tests.test_calibrated import TEXT
from tests.tiny import save_shards, tiny_llama

ODD = "mlp.down_proj"
SECRET = "hf_secret_of_the_user"


class Page(HTMLParser):
    """Tags that are opened and closed in order, and the cells of each table by its id."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text, self._table = "", ""
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.stack.append(tag)
        if tag == "table":
            self._table = str(dict(attributes)["id"])
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.stack and {"td", "th"} & set(self.stack):
            self.tables[self._table][-1][-1] += data


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model whose down_proj has 176 inputs, which no group of 32 divides, and a tensor that nobody asks for."""
    folder = tmp_path_factory.mktemp("report")
    tensors = tiny_llama(folder / "m", intermediate_size=176)
    save_shards(folder / "m", {**tensors, "model.left_over.weight": np.ones((4, 4), np.float32)})
    (folder / "text.txt").write_text(TEXT, encoding="utf8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(folder / "cache"))
        yield folder


def made(source: Path, name: str, **options: Any) -> Path:
    given = {"weight_format": "int4_sym", "group_size": 32, "no_tokenizer": True, "verify": "none", "token": SECRET, **options}
    return export(ExportOptions(model=str(source / "m"), output=source / name, **given)).output


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    return made(source, "plain", override=["*.1.mlp.up_proj=keep"])


@pytest.fixture(scope="module")
def calibrated(source: Path) -> Path:
    return made(
        source, "calibrated", no_tokenizer=False, dataset=str(source / "text.txt"), num_samples=8, sequence_length=64, awq=True, gptq=True
    )


def read(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_every_source_tensor_has_a_fate(plain: Path, source: Path) -> None:
    import safetensors

    with safetensors.safe_open(source / "m" / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    report = read(plain)
    told = {line["tensor"]: line for line in report["tensors"]}
    assert {name: line["shape"] for name, line in told.items()} == shapes
    for name, line in told.items():
        layer = name.removesuffix(".weight")
        if name == "model.left_over.weight":
            assert (line["fate"], line["layers"], line["type"]) == ("unused", {}, "F32")
        elif "norm" in name:
            assert (line["fate"], line["layers"]) == ("kept float", {})
        elif layer == "model.layers.1.mlp.up_proj":
            assert (line["fate"], line["layers"]) == ("kept float", {layer: "keep"})
        else:
            got = "int8_asym" if ODD in name or "embed" in name else "int4_sym:32"
            assert (line["fate"], line["layers"], line["type"]) == ("compressed", {layer: got}, "BF16")


def test_bits_asked_and_taken_are_those_of_the_bytes(plain: Path) -> None:
    report = read(plain)
    rows = {row["scheme"]: row for row in report["requests"]}
    low = rows["int4_sym:32"]
    # 4 bits and an f16 scale for 32 weights.
    assert low["bits_requested"] == 4.5 and low["got"] == {"int4_sym:32": low["weights"] - 2 * 96 * 176, "int8_asym": 2 * 96 * 176}
    # Per channel of 176 weights: a byte each, two of the scale, one of the zero point; half a byte and 2/32 for the others.
    assert low["bytes"] == 2 * 96 * (176 + 3) + (low["weights"] - 2 * 96 * 176) * 18 // 32
    assert low["bits_achieved"] == round(8 * low["bytes"] / low["weights"], 4)
    assert rows["keep"]["bits_requested"] == rows["keep"]["bits_achieved"] == 16
    assert sum(row["bytes"] for row in rows.values()) == report["bytes"]["weights"] == sum(f["bytes"] for f in report["formats"])
    asked = sum(row["bits_requested"] * row["weights"] for row in rows.values()) / report["weights"]
    assert asked == pytest.approx(report["summary"]["bits_per_weight_requested"], abs=1e-3)
    assert all(f["bits_per_weight"] == round(8 * f["bytes"] / f["weights"], 4) for f in report["formats"])


def test_what_fell_back_is_told_with_its_reason(plain: Path, calibrated: Path) -> None:
    report = read(plain)
    assert [(f["kind"], f["layer"], f["asked"], f["got"]) for f in report["fallbacks"]] == [
        ("format", f"model.layers.{i}.{ODD}", "int4_sym:32", "int8_asym") for i in range(2)
    ]
    assert all("32 does not divide 176" in f["reason"] for f in report["fallbacks"])
    lost, wanted = 2 * 96 * 176, report["share"]["wanted"]
    assert report["share"] == {"wanted": wanted, "reached": wanted - lost, "value": round(1 - lost / wanted, 6)}
    assert report["settings"].get("min_share") is None and "min_share" not in report["command"]
    kept_plain = {x["name"] for x in read(calibrated)["layers"] if x["calibration"] and x["calibration"]["kept"] == "plain"}
    assert {f["layer"] for f in read(calibrated)["fallbacks"] if f["kind"] == "rounding"} == kept_plain


@pytest.mark.parametrize("kind", ["plain", "calibrated"])
def test_the_plain_error_is_that_of_rounding_the_source(kind: str, source: Path, request: pytest.FixtureRequest) -> None:
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(source / "m" / "model.safetensors")
    for layer in read(request.getfixturevalue(kind))["layers"]:
        if layer["format"] == "keep":
            assert layer["plain_error"] is None
            continue
        w = tensors[layer["tensor"]].astype(np.float32)
        step = len(w) // 4
        rows = np.concatenate([w[start : start + 4] for start in range(0, len(w), step)])
        back = formats.quantize(formats.get(layer["format"]), rows, layer["group_size"]).stored().dequantize()
        wanted = np.square(rows - back, dtype=np.float64).sum() / np.square(rows, dtype=np.float64).sum()
        # The report has eight decimals.
        assert layer["plain_error"] == pytest.approx(wanted, rel=1e-5, abs=6e-9), layer["name"]
        if kind == "plain" and layer["format"] == "int8_asym" and layer["reason"].startswith("embedding"):
            assert layer["relative_error"] == layer["plain_error"]


def test_without_folds_and_with_the_plain_rule_both_errors_are_one(source: Path) -> None:
    report = read(made(source, "nncf", folds="none", scale_rule="minmax"))
    assert all(layer["relative_error"] == layer["plain_error"] > 0 for layer in report["layers"])


def test_data_command_and_stages_are_told(calibrated: Path, source: Path) -> None:
    report = read(calibrated)
    for text in ((calibrated / name).read_text() for name in ("report.md", "report.html")):
        for words in (report["data"]["xxh3_128"], report["data"]["taken"], "512 tokens", f"openvino {report['versions']['openvino']}"):
            assert words in text
    assert report["command"] in (calibrated / "report.md").read_text()
    assert {"checks", "graph", "plan", "calibrate", "compress", "write", "verify"} <= report["seconds"].keys()
    assert not [p.name for p in calibrated.glob("report.*") if SECRET in p.read_text()]


def test_the_page_has_what_the_json_has(plain: Path, calibrated: Path) -> None:
    for folder, charts in ((plain, 4), (calibrated, 5)):
        report, text = read(folder), (folder / "report.html").read_text()
        page = Page(text)
        assert [row[0] for row in page.tables["layers"][1:]] == [layer["name"] for layer in report["layers"]]
        for row, layer in zip(page.tables["layers"][1:], report["layers"], strict=True):
            assert row[6] == ("" if layer["plain_error"] is None else f"{layer['plain_error']:.3g}") and row[9] == f"{layer['bytes']:,}"
            assert row[7] == (f"{layer['calibration']['loss']:.3g}" if layer["calibration"] else "")
        assert [row[0] for row in page.tables["fallbacks"][1:]] == [f["layer"] for f in report["fallbacks"]]
        assert [row[0] for row in page.tables["requests"][1:]] == [q["scheme"] for q in report["requests"]]
        told = sum(
            1 + row[0].count(", ") + (int(row[0].split(" and ")[1].split()[0]) if " and " in row[0] else 0)
            for row in page.tables["tensors"][1:]
        )
        assert told == len(report["tensors"])
        svgs = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
        assert len(svgs) == charts and all(ElementTree.fromstring(svg).tag.endswith("}svg") for svg in svgs)
        names = re.findall(r' id="([^"]+)"', text)
        assert len(names) == len(set(names)) and set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(names)
        # A point for each layer in a block that was rounded, in the chart of errors.
        rounded = [x for x in report["layers"] if ".layers." in x["name"] and x["format"] != "keep"]
        kinds = {x["name"].replace(".0.", ".1.") for x in rounded}
        # With one more for each line in the legend.
        assert len(re.findall(r"<use [^>]*fill: #", svgs[2])) == len(rounded) + len(kinds)


def test_the_page_loads_nothing_and_escapes_everything(plain: Path) -> None:
    report = read(plain)
    evil = '<script src="http://x/y.js">&"\''
    report |= {"source": evil, "command": evil, "warnings": [evil]}
    report["layers"][1]["name"] = f"{evil}.1.{evil}"
    page = Page(report_page.page(report))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    attributes = [pair for _, given in page.tags for pair in given.items()]
    assert not [
        a for a, value in attributes if a.startswith("on") or (a in ("href", "src", "xlink:href") and not str(value).startswith("#"))
    ]
    assert "@import" not in page.text and "url(" not in page.text and page.text.count("y.js") >= 5


def test_many_tensors_of_one_layer_are_one_row() -> None:
    experts = [
        {"tensor": f"experts.{i}.up.weight", "shape": [4, 4], "type": "F32", "fate": "merged", "layers": {"experts.up": "int4_asym:64"}}
        for i in range(128)
    ]
    norms = [{"tensor": f"layers.{i}.norm.weight", "shape": [4], "type": "F32", "fate": "kept float", "layers": {}} for i in range(2)]
    assert report_page.tensor_rows([*experts, *norms]) == [
        {
            "fate": "merged",
            "names": [f"experts.{i}.up.weight" for i in range(3)],
            "more": 125,
            "layers": {"experts.up": "int4_asym:64"},
            "of_fate": 128,
        },
        {"fate": "kept float", "names": ["layers.0.norm.weight", "layers.1.norm.weight"], "more": 0, "layers": {}, "of_fate": 2},
    ]


def test_calibration_that_does_not_reach_or_does_not_win_is_a_fallback() -> None:
    layers = [
        Layer(f"model.layers.{i}.w", f"model.layers.{i}.w.weight", (64, 64), ("MatMul",), (), "F32", i, i, False, False) for i in range(3)
    ]
    asked = make_plan(layers, ExportOptions(model="m", gptq=True, dataset="d"))
    plan, missed = asked.without_calibration({layers[1].name, layers[2].name})
    assert missed == [layers[0].name]
    told = {
        layers[1].name: {"kept": "plain"},
        layers[2].name: {"kept": "calibrated", "experts_kept": {"calibrated": 5, "plain": 1}, "few_tokens": [3, 4]},
    }
    found = fates.fallbacks(plan, told, [layers[1].name])
    assert [(f["kind"], f["layer"], f["got"]) for f in found] == [
        ("calibration", layers[0].name, f"plain {plan.layers[0].rule}"),
        ("rounding", layers[1].name, "plain rounding"),
        ("rounding", layers[2].name, "1 of 6 experts plain"),
        ("experts", layers[2].name, "tokens of all kinds"),
        ("scales", layers[1].name, "f32"),
    ]
    assert "experts 3, 4" in found[3]["reason"]
