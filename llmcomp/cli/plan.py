"""`llmcomp plan MODEL`: the plan as JSON, with exact sizes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmcomp.cli.arguments import add_arguments, check_file, options_of
from llmcomp.options.table import PLAN


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="write what an export would do with each layer, as JSON to edit and feed back")
    add_arguments(parser, PLAN)
    parser.add_argument("-o", "--output-file", metavar="FILE", help="Write there instead of to standard output.")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    options = options_of(parsed)
    if parsed.output_file:
        check_file(Path(parsed.output_file), options.overwrite)
    from llmcomp.cli.progress import make_progress
    from llmcomp.export import plan_model

    with make_progress(quiet=False, json_log=None, stream=sys.stderr) as progress:
        # A plan is about weights: a source without tokenizer has one too.
        text = plan_model(options.model_copy(update={"no_tokenizer": True}), progress).to_json()
    if parsed.output_file:
        Path(parsed.output_file).write_text(text, encoding="utf8")
    else:
        sys.stdout.write(text)
    return 0
