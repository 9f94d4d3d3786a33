"""`llmcomp eval FOLDER ... [--reference FOLDER_OR_HF]`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from llmcomp.errors import NOT_JUDGED

LINE_SECONDS = 30.0
"""Between lines of progress where there is no terminal."""
COLUMNS = ("ppl", "word_ppl", "kl", "kl_se", "kl_p50", "kl_p90", "kl_p99", "top1")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="perplexity of OpenVINO folders, and KL divergence to a reference")
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments, shared with evaluation/perplexity.py."""
    add_common_arguments(parser)
    parser.add_argument(
        "--stride", type=int, help="Tokens between window starts; below the window only new tokens are scored. Default: the window."
    )
    parser.add_argument("--windows", type=int, metavar="N", help="Judge on the first N windows only.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the scores as JSON.")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What is judged on what, the same for every command that judges."""
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="OpenVINO folders to judge.")
    parser.add_argument(
        "--reference", metavar="FOLDER_OR_HF", help="OpenVINO folder, Hugging Face folder or hub id (run in float32) to compare with."
    )
    parser.add_argument("--tokenizer", metavar="FOLDER_OR_HF", help="Default: that of the first folder that has one, else the reference's.")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to judge on. Default: the topics of Python's own help.")
    parser.add_argument("--dataset", metavar="NAME[:SPLIT]", help="Hub dataset to judge on; split test unless given.")
    parser.add_argument("--dataset-config", metavar="NAME", help="The dataset's configuration.")
    parser.add_argument("--dataset-column", metavar="NAME", help="Its text column. Default: text, sentence or content.")
    parser.add_argument("--window", type=int, default=512, help="Tokens per window. Default: 512.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run model code that comes with a Hugging Face reference.")


def run(parsed: argparse.Namespace) -> int:
    from llmcomp.judge import JudgeError, evaluate, load_text

    try:
        if parsed.json and not parsed.json.absolute().parent.is_dir():
            raise JudgeError(f"--json {parsed.json}: there is no folder {parsed.json.absolute().parent}. Make it first.")
        text = load_text(parsed.text, parsed.dataset, parsed.dataset_config, parsed.dataset_column)
        with Windows() as face:
            scores = evaluate(
                parsed.folders,
                text,
                parsed.reference,
                parsed.tokenizer,
                parsed.window,
                parsed.stride,
                parsed.windows,
                parsed.trust_remote_code,
                tell=face.tell,
                progress=face.advance,
            )
    except JudgeError as error:
        print(f"llmcomp: error: {error}", file=sys.stderr)
        return NOT_JUDGED
    (_table if sys.stdout.isatty() else _lines)(scores)
    first = scores[0]
    note = "" if all(s.kl is None for s in scores) else "; KL(reference || model) in nats per token"
    print(f"{text.name}: {first.windows} windows of {first.window} tokens, stride {first.stride}, no BOS{note}")
    if parsed.json:
        parsed.json.write_text(json.dumps(_record(parsed, text, scores), indent=1, allow_nan=False) + "\n", encoding="utf8")
    return 0


class Windows:
    """Progress over windows: a bar with the time left on a terminal; else a line now and then. On stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True, highlight=False)
        columns = (TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task: Any = None
        self._started = self._told = time.monotonic()

    def tell(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def advance(self, done: int, total: int) -> None:
        if self._bar:
            self._task = self._bar.add_task("", total=total) if self._task is None else self._task
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if done == 0:
            self._started = self._told = now
            self.tell(f"{total} {'window' if total == 1 else 'windows'}")
        elif now - self._told > LINE_SECONDS and done < total:
            self._told = now
            self.tell(f"{done} of {total} windows, about {(now - self._started) / done * (total - done):.0f} s left")

    def __enter__(self) -> Windows:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


def _table(scores: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    table.add_column("model", overflow="fold")
    for name in ("ppl", "word ppl", "KL", "± se", "median", "90 %", "99 %", "top-1", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in scores:
        figures = _figures(s)
        size = f"{s.bin_bytes / 2**20:.1f}" if s.bin_bytes is not None else ""
        # Not as markup: a folder may have brackets in its name.
        table.add_row(Text(s.name), *(figures.get(k, "") for k in COLUMNS), size)
    Console(highlight=False).print(table)


def _lines(scores: list[Any]) -> None:
    for s in scores:
        words = [f"{key}={value}" for key, value in _figures(s).items()]
        if s.bin_bytes is not None:
            words += [f"bin_bytes={s.bin_bytes}", f"bin_mib={s.bin_bytes / 2**20:.1f}"]
        print(f"{s.name}: {' '.join(words)} s={s.seconds:.1f}")


def _figures(s: Any) -> dict[str, str]:
    """Printed figures by name; those that there are."""
    p = s.kl_percentiles or {}
    digits = {
        "ppl": (s.perplexity, 4),
        "word_ppl": (s.word_perplexity, 2),
        "kl": (s.kl, 5),
        "kl_se": (s.kl_standard_error, 5),
        **{f"kl_p{q}": (value, 5) for q, value in p.items()},
        "top1": (s.top1, 4),
    }
    # Adding zero turns the -0.0 of rounding noise into 0.0.
    return {key: f"{round(value, n) + 0.0:.{n}f}" for key, (value, n) in digits.items() if value is not None}


def _record(parsed: argparse.Namespace, text: Any, scores: list[Any]) -> dict[str, Any]:
    import hashlib
    from dataclasses import asdict
    from importlib.metadata import version

    from llmcomp.judge import PROPERTIES

    content = text.content.encode("utf8", "surrogatepass")
    # JSON has no infinity.
    told = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(s).items()} for s in scores]
    return {
        "command": command_line("perplexity.py"),
        "reference": parsed.reference,
        "text": text.name,
        "text_sha256": hashlib.sha256(content).hexdigest(),
        "properties": PROPERTIES,
        "versions": {name: version(name) for name in ("openvino", "numpy")},
        "scores": told,
    }


def command_line(script: str) -> str:
    """What was called: `llmcomp`, or the script in evaluation/ that stands for it."""
    import shlex

    program = f"python evaluation/{script}" if Path(sys.argv[0]).name == script else "llmcomp"
    return f"{program} {shlex.join(sys.argv[1:])}"
