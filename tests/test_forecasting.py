"""The forecast of calibrated runs against counts by hand and a measured run; and what a machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from llmcomp import export as path
from llmcomp import forecasting
from llmcomp.cli import main
from llmcomp.export import dry_run, export
from llmcomp.forecasting import BASE_BYTES, calibration_needs, shortages, with_calibration
from llmcomp.graph.layer import Layer
from llmcomp.graph.sections import Section, Sections
from llmcomp.options import ExportOptions
from llmcomp.planning import Plan, make_plan
from llmcomp.progress import Progress
from llmcomp.writing.forecast import Forecast
from tests.planning.layers import layer
from tests.tiny import tiny_llama

MIB = 1 << 20


def llama(hidden: int, inner: int, keys: int, blocks: int = 2) -> tuple[list[Layer], Sections]:
    """The sections of a llama, without models: only shapes count."""
    table = layer("model.embed_tokens", 1000, hidden, ("Gather", "MatMul"), last=True)
    layers, parts = [table], [Section("embedding", (table,), ov.Model([], []), (), (), False)]
    for i in range(blocks):
        shapes = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
        shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        own = {name: layer(f"model.layers.{i}.{name}", *shape) for name, shape in shapes.items()}
        sites = tuple(tuple(own[n].name for n in names) for names in ("qkv", "o", ("gate", "up"), ("down",)))
        parts.append(Section(f"block {i}", tuple(own.values()), ov.Model([], []), (), sites, i == blocks - 1))
        layers += own.values()
    return layers, Sections(tuple(parts), ov.Model([], []), (), table)


def plan(layers: list[Layer], **options: Any) -> Plan:
    return make_plan(layers, ExportOptions(model="m", dataset="d", **options))


def test_a_llama_of_a_billion_parameters_takes_what_was_measured() -> None:
    """README's table: 2218 MiB at the peak, 681 MiB of disk beside the .bin, with 32 x 256 tokens; a forecast within a quarter is of use."""
    layers, sections = llama(2048, 8192, 512)
    needs = calibration_needs(sections, plan(layers, awq=True, scale_estimation=True, gptq=True), 32 * 256)
    assert 0.75 * 2218 < needs.memory_bytes / MIB < 1.25 * 2218
    assert 0.75 * 681 < needs.disk_bytes / MIB < 1.25 * 681


def test_the_counts_are_those_of_the_shapes() -> None:
    layers, sections = llama(64, 128, 64)
    block = 4 * 64 * 64 + 3 * 64 * 128
    hidden, tokens = 4 * 1000 * 64, 1000
    needs = calibration_needs(sections, plan(layers, scale_estimation=True), tokens)
    # All second moments together, the weights of gate and up five times, hidden states once, a batch of the inner width.
    moments = 4 * (3 * 64**2 + 128**2)
    assert needs.memory_bytes == BASE_BYTES + 8 * block + moments + 20 * 2 * 64 * 128 + hidden + 4 * 4 * tokens * 128
    assert needs.disk_bytes == 2 * hidden
    assert needs.operations == 2 * tokens * (2 * block + 3 * 64**2 + 128**2)
    in_turn = calibration_needs(sections, plan(layers, gptq=True), tokens)
    three = 3 * 4 * 128**2
    assert in_turn.memory_bytes == needs.memory_bytes + three - moments + 2 * 4 * tokens * 128
    both = calibration_needs(sections, plan(layers, gptq=True, target_correction=True), tokens)
    assert both.operations == 2 * needs.operations and both.disk_bytes == 4 * hidden
    assert both.memory_bytes == in_turn.memory_bytes + hidden


def test_what_is_large_lies_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, sections = llama(64, 128, 64)
    tokens, wanted = 1000, plan(layers, gptq=True)
    before = calibration_needs(sections, wanted, tokens)
    monkeypatch.setattr(forecasting, "MAPPED_FROM", 2 * 4 * tokens * 128)
    after = calibration_needs(sections, wanted, tokens)
    assert before.memory_bytes - after.memory_bytes == after.disk_bytes - before.disk_bytes == 2 * 4 * tokens * 128


def test_time_is_operations_by_this_machines_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < forecasting.operations_per_second() < 1e15
    monkeypatch.setattr(forecasting, "operations_per_second", lambda: 1e9)
    found = with_calibration(Forecast(10, 1000, 1.0), forecasting.Needs(500, 7, 3e9))
    assert (found.memory_bytes, found.more_disk_bytes, found.calibrate_seconds, found.compress_seconds) == (1000, 7, 3.0, 1.0)


def test_what_the_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shortages(Forecast(1, 1, 0.0), tmp_path / "deep" / "out") == []
    disk, memory = shortages(Forecast(1 << 60, 1 << 60, 0.0, more_disk_bytes=1 << 60), tmp_path / "out")
    assert disk.startswith("disk: about 2,199,023,255,616 MiB are needed, and ") and memory.startswith(
        "memory: about 1,099,511,627,776 MiB are needed"
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("forecast")
    tiny_llama(folder / "m", intermediate_size=176)
    (folder / "text.txt").write_text("The tide was out, and the boats lay on their sides. " * 200, encoding="utf8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCOMP_CACHE", str(folder / "cache"))
        yield folder


def test_a_dry_run_tells_all_of_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", str(source / "m"), str(tmp_path / "out"), "--group-size", "32", "--no-tokenizer", "--dry-run"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "exact; a few MiB beside it\n" in told.out and "push the calibration data" not in told.out and "warning" not in told.err
    assert "share   77.6 % of the weights" in told.out
    monkeypatch.setattr("llmcomp.forecasting.SPARE", 1 << 60)
    data = ["--dataset", str(source / "text.txt"), "--num-samples", "4", "--sequence-length", "64", "--gptq", "--awq"]
    assert main([*command, *data]) == 0
    told = capsys.readouterr()
    assert "MiB for calibration until it is finished" in told.out and "s to push the calibration data through the model" in told.out
    assert "warning: disk: about" in told.err and not list(tmp_path.iterdir())


def test_the_forecast_of_a_calibrated_run_counts_its_data(source: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    class Face(Progress):
        pass

    given: dict[str, Any] = {"model": str(source / "m"), "group_size": 32, "no_tokenizer": True, "gptq": True}
    given |= {"dataset": str(source / "text.txt"), "sequence_length": 64}
    with pytest.MonkeyPatch.context() as patch:
        original = path.calibration_needs
        patch.setattr(path, "calibration_needs", lambda sections, plan, tokens: seen.append(tokens) or original(sections, plan, tokens))
        found = [dry_run(ExportOptions(**given, output=tmp_path / "out", num_samples=n), Face()) for n in (4, 8)]
    assert seen == [256, 512]
    # Twice the hidden states of the tokens, [tokens, 96], in a state and its successor.
    assert [one.more_disk_bytes for one in found] == [2 * 4 * n * 96 for n in seen]
    assert (
        found[0].bin_bytes
        == (export(ExportOptions(**given, output=tmp_path / "out", num_samples=4)).output / "openvino_model.bin").stat().st_size
    )
