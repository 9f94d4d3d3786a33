"""Results as tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llmcomp.forecasting import operations_per_second
from llmcomp.planning import Budget

if TYPE_CHECKING:
    from llmcomp.export import Result
    from llmcomp.inspect import Inspection
    from llmcomp.training.forecast import TrainingForecast
    from llmcomp.writing.forecast import Forecast


def _console(file: TextIO | None = None) -> Console:
    # Piped output keeps its lines whole; a terminal has its own width.
    console = Console(highlight=False, file=file)
    return console if console.is_terminal else Console(highlight=False, width=110, file=file)


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _bins(names: Collection[str]) -> str:
    return " and ".join([", ".join([*names][:-1]), [*names][-1]] if len(names) > 1 else names)


def _group(size: int | None) -> str:
    return str(size) if size and size > 0 else "channel"


def print_result(result: Result) -> None:
    report = result.report
    table = Table("format", "group", "layers", "weights", "bytes", box=None, header_style="bold")
    for row in report["formats"]:
        group = "" if row["format"] == "keep" else _group(row["group_size"])
        table.add_row(row["format"], group, str(row["layers"]), f"{row['weights']:,}", _mib(row["bytes"]))
    console = _console()
    console.print(table)
    console.print(
        f"{report['bits_per_weight']} bits per weight in layers; {_mib(report['bytes']['bin'])} in {_bins([one['name'] + '.bin' for one in report['submodels']])}"
    )
    console.print(f"verified: {report['verified']}")
    judged = report["evaluation"]
    if judged:
        error = judged["kl_standard_error"]
        console.print(
            f"judged: KL {judged['kl']:.5f} ± {error:.5f} nats per token to the checkpoint in float32, top-1 {judged['top1']:.4f}"
        )
    if report["budget"]:
        print_budget(Budget.model_validate({key: value for key, value in report["budget"].items() if key != "evaluations"}))
        for one in report["budget"]["evaluations"]:
            told = "holds" if one["holds"] else "does not hold"
            console.print(
                f"judged: KL {one['kl']:.5f}, {one['upper']:.5f} by the upper 95 % bound, {told} (predicted {one['predicted']:.5f})"
            )
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report["seconds"].items())
    console.print(f"seconds: {stages}", soft_wrap=True)
    console.print(f"[bold]{escape(str(result.output))}[/bold] is ready; report.html there tells about every layer", soft_wrap=True)


def print_budget(budget: Budget, file: TextIO | None = None) -> None:
    """What a budget came to, and the table of sizes against losses."""
    console = _console(file)
    name, form = "--" + budget.kind.replace("_", "-"), {"target_size": ",.0f", "target_bpw": ".4f", "max_loss": ".5f"}[budget.kind]
    bound = f"{_mib(budget.bound)} of weights" if budget.kind == "max_loss" else f"{budget.nats - budget.gap:.5f} nats"
    best = "and no plan is predicted to do better" if not budget.gap else f"and none can do better than {bound}"
    console.print(
        f"{name} {budget.requested:{form}}: {budget.reached:{form}} reached, predicted to lose {budget.nats:.5f} nats per token, {best}",
        soft_wrap=True,
    )
    table = Table("bits per weight", ".bin", "predicted loss", box=None, header_style="bold")
    for point in budget.table:
        table.add_row(f"{point.bits_per_weight:.3f}", _mib(point.bin_bytes), f"{point.nats:.5f}")
    console.print(table)


def print_forecast(forecast: Forecast) -> None:
    console = _console()
    more = f", and about {_mib(forecast.more_disk_bytes)} for calibration until it is finished" if forecast.more_disk_bytes else ""
    console.print(f"disk    {_mib(forecast.bin_bytes)} of weights in all, exact; a few MiB beside it{more}", soft_wrap=True)
    console.print(f"memory  about {_mib(forecast.memory_bytes)} at the peak, beyond mapped files")
    console.print(f"time    about {forecast.compress_seconds:.1f} s to compress plainly, measured on one tile of each kind", soft_wrap=True)
    if forecast.calibrate_seconds is not None:
        console.print(
            f"        about {forecast.calibrate_seconds:.1f} s to push the calibration data through the model, by the speed of a matrix product; "
            "what the methods compute with it comes on top, and may be as much again or more",
            soft_wrap=True,
        )
    if forecast.share < 1:
        console.print(f"share   {100 * forecast.share:.1f} % of the weights that are to get a format get it", soft_wrap=True)


def print_training_forecast(forecast: TrainingForecast) -> None:
    console = _console()
    console.print(
        f"disk    about {_mib(forecast.disk_bytes)} at the most, of which {_mib(forecast.cache_bytes)} are the teacher's answers, exact",
        soft_wrap=True,
    )
    console.print(f"memory  about {_mib(forecast.memory_bytes)} at the peak, beyond mapped files; in training")
    table = Table("", "", box=None, show_header=False)
    for name, nbytes in forecast.parts.items():
        table.add_row(f"        {name}", _mib(nbytes))
    console.print(table)
    steps = "as many steps as the minutes hold" if forecast.steps is None else f"{forecast.steps:,} steps"
    console.print(f"rows    {forecast.rows:,} to train on and {forecast.held_out_rows:,} held out, of {forecast.length:,} tokens; {steps}")
    if forecast.operations is not None:
        seconds = forecast.operations / operations_per_second()
        console.print(
            f"time    about {seconds / 60:,.1f} minutes to train, by the speed of a matrix product; rather more than less", soft_wrap=True
        )


def print_inspection(folder: Path, found: Inspection) -> None:
    table = Table("type", "group", "constants", "elements", "bytes", box=None, header_style="bold")
    for row in found.rows:
        table.add_row(row.element_type, _group(row.group_size), str(row.count), f"{row.weights:,}", _mib(row.bytes))
    console = _console()
    console.print(table)
    console.print(f"{found.bits_per_weight:.3f} bits per weight; {_mib(found.bin_bytes)} in {_bins(found.files)}; made by {found.made_by}")
    if found.report is not None:
        stored = ", ".join(f"{count} layers {method}" for method, count in (found.report.get("stored") or {}).items())
        told = f" (stored as {escape(stored)})" if stored else ""
        console.print(f"source {escape(str(found.report['source']))}{told}; verified: {found.report['verified']}", soft_wrap=True)
