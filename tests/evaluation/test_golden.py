"""The project against evaluation/golden.yaml: what every number format makes of the real model."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from evaluation import golden

GOLDEN = golden.read()
NAMES = golden.names()
JUDGED = ("int4_sym", "int4_asym", "nf4", "mxfp4", "fp8_e4m3")
"""One of each kind of arithmetic, here and always: integers without and with zero point, a table, an E8M0 scale, bytes that are floats."""
Make = Callable[[str], tuple[golden.Row, Path]]


def test_every_format_is_in_it() -> None:
    """If not: `python evaluation/golden.py`."""
    assert set(GOLDEN["formats"]) == set(NAMES)


def test_it_was_measured_on_this_text() -> None:
    text = golden.TEXT.read_bytes()
    assert GOLDEN["text"] == {
        "file": golden.TEXT.name,
        "sha256": hashlib.sha256(text).hexdigest(),
        "window": golden.WINDOW,
        "windows": golden.WINDOWS,
    }


def test_it_comes_back_as_it_was_written(tmp_path: Path) -> None:
    golden.write({key: value for key, value in GOLDEN.items() if key != "command"}, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text(encoding="utf8") == golden.GOLDEN.read_text(encoding="utf8")


def changed(name: str, **figures: Any) -> dict[str, Any]:
    return {**GOLDEN, "formats": GOLDEN["formats"] | {name: GOLDEN["formats"][name] | figures}}


def test_it_agrees_with_itself_and_with_another_cpu() -> None:
    row = GOLDEN["formats"]["nf4"]
    assert golden.compare(GOLDEN, GOLDEN) == []
    assert golden.compare(GOLDEN, changed("nf4", kl=row["kl"] * 1.005, ppl=row["ppl"] * 1.005, kl_se=1.0)) == []


@pytest.mark.parametrize(
    ("figure", "change"), [("kl", 1.03), ("kl", 0.97), ("ppl", 1.1), ("bin_bytes", 1.0 + 1e-6), ("bits", 1.0001)], ids=str
)
def test_a_change_is_told(figure: str, change: float) -> None:
    was = GOLDEN["formats"]["nf4"][figure]
    assert [row[:2] for row in golden.compare(GOLDEN, changed("nf4", **{figure: was * change}))] == [("nf4", figure)]


def test_a_layer_more_and_formats_that_come_and_go_are_told() -> None:
    fewer = {**GOLDEN, "formats": {name: row for name, row in GOLDEN["formats"].items() if name != "nf4"}}
    assert [row[:2] for row in golden.compare(GOLDEN, changed("nf4", layers={"nf4:64": 211}))] == [("nf4", "layers")]
    assert [row[0] for row in golden.compare(GOLDEN, fewer)] == [row[0] for row in golden.compare(fewer, GOLDEN)] == ["nf4"]


@pytest.fixture(scope="module")
def make(smollm2_gguf: Path, smollm2_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Export a format, once."""
    work = tmp_path_factory.mktemp("golden")

    @cache
    def make(name: str) -> tuple[golden.Row, Path]:
        folder = work / str(NAMES.index(name))
        return golden.make(smollm2_gguf, name, folder), folder

    yield make
    # Together 1.4 GB, and pytest keeps the folders of three runs.
    shutil.rmtree(work)


@pytest.mark.slow
@pytest.mark.fetch
@pytest.mark.parametrize("name", NAMES)
def test_layers_and_bytes(make: Make, name: str) -> None:
    assert golden.differences(name, GOLDEN["formats"][name], make(name)[0]) == []


def damage(make: Make, reference: Path, names: tuple[str, ...]) -> list[tuple[str, str, str, str]]:
    base, rows = golden.judge([make(name)[1] for name in names], reference)
    differences = golden.differences("reference", GOLDEN["reference"], base)
    return differences + [d for name, row in zip(names, rows, strict=True) for d in golden.differences(name, GOLDEN["formats"][name], row)]


@pytest.mark.slow
@pytest.mark.fetch
def test_damage(make: Make, smollm2_fp32: Path) -> None:
    assert damage(make, smollm2_fp32, JUDGED) == []


REST = tuple(name for name in NAMES if name not in JUDGED)
BATCHES = [REST[start : start + golden.BATCH] for start in range(0, len(REST), golden.BATCH)]


@pytest.mark.longest
@pytest.mark.fetch
@pytest.mark.parametrize("names", BATCHES, ids="+".join)
def test_damage_of_the_others(make: Make, smollm2_fp32: Path, names: tuple[str, ...]) -> None:
    assert damage(make, smollm2_fp32, names) == []
