"""`llmcomp measure MODEL -o FILE`: what each layer suffers from few bits, as JSON that `llmcomp plan` reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmcomp.cli.arguments import add_arguments, check_file, options_of
from llmcomp.options.table import MEASURE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("measure", help="measure what each layer suffers from few bits, as JSON to edit and give to plan")
    add_arguments(parser, MEASURE)
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="Write there.")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    options = options_of(parsed)
    path = Path(parsed.output_file)
    check_file(path, options.overwrite)
    from llmcomp.cli.progress import make_progress
    from llmcomp.export import measure_model

    with make_progress(quiet=False, json_log=None, stream=sys.stderr) as progress:
        text = measure_model(options, progress).to_json()
    path.write_text(text, encoding="utf8")
    return 0
