"""`llmcomp eval FOLDER ... [--reference FOLDER_OR_HF]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="perplexity of OpenVINO folders, and KL divergence to a reference")
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments, shared with evaluation/perplexity.py."""
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="OpenVINO folders to judge.")
    parser.add_argument(
        "--reference", metavar="FOLDER_OR_HF", help="OpenVINO folder, Hugging Face folder or hub id (run in float32) to compare with."
    )
    parser.add_argument("--tokenizer", metavar="FOLDER_OR_HF", help="Default: that of the first folder.")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to judge on. Default: the topics of Python's own help.")
    parser.add_argument("--dataset", metavar="NAME[:SPLIT]", help="Hub dataset to judge on; split test unless given.")
    parser.add_argument("--dataset-config", metavar="NAME", help="The dataset's configuration.")
    parser.add_argument("--dataset-column", metavar="NAME", help="Its text column. Default: text, sentence or content.")
    parser.add_argument("--window", type=int, default=512, help="Tokens per window. Default: 512.")
    parser.add_argument(
        "--stride", type=int, help="Tokens between window starts; below the window only new tokens are scored. Default: the window."
    )
    parser.add_argument("--windows", type=int, metavar="N", help="Judge on the first N windows only.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run model code that comes with a Hugging Face reference.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the scores as JSON.")


def run(parsed: argparse.Namespace) -> int:
    from llmcomp.judge import JudgeError, evaluate, load_text

    try:
        text = load_text(parsed.text, parsed.dataset, parsed.dataset_config, parsed.dataset_column)
        scores = evaluate(
            parsed.folders,
            text,
            parsed.reference,
            parsed.tokenizer,
            parsed.window,
            parsed.stride,
            parsed.windows,
            parsed.trust_remote_code,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except JudgeError as error:
        print(f"llmcomp: error: {error}", file=sys.stderr)
        return 8
    _print(scores, text.name)
    if parsed.json:
        from dataclasses import asdict

        parsed.json.write_text(json.dumps({"text": text.name, "scores": [asdict(s) for s in scores]}, indent=1) + "\n", encoding="utf8")
    return 0


def _print(scores: list[Any], text: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "ppl", "word ppl", "KL", "± se", "median", "90 %", "99 %", "top-1", "MiB", box=None, header_style="bold")
    for s in scores:
        p = s.kl_percentiles or {}
        table.add_row(
            s.name,
            f"{s.perplexity:.4f}",
            f"{s.word_perplexity:.2f}",
            _number(s.kl, 5),
            _number(s.kl_standard_error, 5),
            *(_number(p.get(q), 5) for q in ("50", "90", "99")),
            _number(s.top1, 4),
            f"{s.bin_bytes / 2**20:.1f}" if s.bin_bytes else "",
        )
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=160)
    console.print(table)
    first = scores[0]
    console.print(
        f"{text}: {first.windows} windows of {first.window} tokens, stride {first.stride}, no BOS; KL(reference || model) in nats per token"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
