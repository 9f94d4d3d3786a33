"""`llmcomp compare FOLDER ... [--reference FOLDER_OR_HF] [--output FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from llmcomp.cli.eval import Windows, add_common_arguments, command_line
from llmcomp.errors import NOT_JUDGED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare", help="size, accuracy, speed and answers of OpenVINO folders side by side, as a table and a page"
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments, shared with evaluation/compare.py."""
    add_common_arguments(parser)
    parser.add_argument("--windows", type=int, default=24, metavar="N", help="Judge on the first N windows. Default: 24.")
    parser.add_argument(
        "--prompts", metavar="FILE", help="UTF-8 text, a prompt on each line, for the answers. Default: twelve built-in ones."
    )
    parser.add_argument(
        "--answer-tokens", type=int, default=64, metavar="N", help="Tokens of an answer at most; 0: no answers. Default: 64."
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="Tokens of the prompt that speed is measured with. Default: 128."
    )
    parser.add_argument("--speed-tokens", type=int, default=32, metavar="N", help="Tokens decoded behind it. Default: 32.")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="Of the speed measurement, after one to warm up; 0: no speed. Default: 5."
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="Also write compare.md, compare.json and compare.html there.")
    parser.add_argument("--overwrite", action="store_true", help="Replace these files where they exist.")


def run(parsed: argparse.Namespace) -> int:
    from llmcomp.comparison import check_output, make_record, write_comparison
    from llmcomp.inspect import inspect_folder
    from llmcomp.judge import PROMPTS, JudgeError, Settings, compare, load_prompts, load_text, require_ir

    if parsed.output:
        check_output(parsed.output, parsed.overwrite)
    try:
        text = load_text(parsed.text, parsed.dataset, parsed.dataset_config, parsed.dataset_column)
        settings = Settings(
            window=parsed.window,
            windows=parsed.windows,
            prompts=load_prompts(parsed.prompts) if parsed.prompts else PROMPTS,
            answer_tokens=parsed.answer_tokens,
            prompt_tokens=parsed.prompt_tokens,
            speed_tokens=parsed.speed_tokens,
            repeats=parsed.repeats,
        )
        folders = [
            *parsed.folders,
            *([parsed.reference] if parsed.reference and (Path(parsed.reference) / "openvino_model.xml").is_file() else []),
        ]
        for folder in folders:
            require_ir(Path(folder))
        inspections = {folder: inspect_folder(Path(folder)) for folder in folders}
        with Windows() as face:
            found = compare(
                parsed.folders,
                text,
                parsed.reference,
                parsed.tokenizer,
                settings,
                parsed.trust_remote_code,
                tell=face.tell,
                progress=face.advance,
            )
    except JudgeError as error:
        print(f"llmcomp: error: {error}", file=sys.stderr)
        return NOT_JUDGED
    record = make_record(found, inspections, text, command_line("compare.py"))
    _print(record)
    if parsed.output:
        write_comparison(record, parsed.output)
        print(f"{parsed.output / 'compare.html'} shows it to others")
    return 0


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from llmcomp.comparison import used

    columns = used(record["models"])
    table = Table(box=None, header_style="bold")
    table.add_column("")
    table.add_column("model", overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for model in record["models"]:
        # Not as markup: a folder may have brackets in its name.
        table.add_row(model["number"], Text(model["label"]), *(column.cell(model) for column in columns))
    console = Console(highlight=False)
    # Piped output keeps its lines whole.
    console = console if console.is_terminal else Console(highlight=False, width=10_000)
    console.print(table)
    text = record["text"]
    console.print(f"{text['name']}: {text['windows']} windows of {text['window']} tokens, no BOS", markup=False)
