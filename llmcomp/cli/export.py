"""`llmcomp export MODEL OUT`."""

from __future__ import annotations

import argparse

from llmcomp.cli.arguments import add_arguments, options_of
from llmcomp.options.table import EXPORT

DESCRIPTION = """Compress a checkpoint into an OpenVINO folder. Without options: int4 with zero points, group 64, embedding and last layer
at 8 bits, tokenizer included, verified before the folder appears."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", help="compress a checkpoint into an OpenVINO folder", description=DESCRIPTION)
    add_arguments(parser, EXPORT)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    options = options_of(parsed)
    # Imported here: `llmcomp --help` must not load numpy and the runtime.
    from llmcomp.cli.progress import make_progress
    from llmcomp.cli.summary import print_forecast, print_result
    from llmcomp.export import dry_run, export

    with make_progress(options.quiet, options.json_log) as progress:
        if options.dry_run:
            print_forecast(dry_run(options, progress))
            return 0
        result = export(options, progress)
    if not options.quiet:
        print_result(result)
    return 0
