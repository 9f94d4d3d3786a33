"""`llmcomp export MODEL OUT`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcomp.cli.arguments import add_arguments, options_of
from llmcomp.errors import NOT_JUDGED, PARTLY
from llmcomp.options.table import EXPORT

if TYPE_CHECKING:
    from llmcomp.options import ExportOptions

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
    return exit_code(options, result.report)


def exit_code(options: ExportOptions, report: Mapping[str, Any]) -> int:
    """What a finished export exits with: not 0, and said on stderr, if it is less than what was asked for."""
    share = report["share"]
    done = f"the model is complete ({report['verified']})"
    if share is not None and share["reached"] < options.min_share * share["wanted"]:
        fell = [line for line in report["fallbacks"] if line["kind"] == "format"]
        print(
            f"llmcomp: partly: {done}, but {100 * share['value']:.1f} % of the weights that were to get a format have got it, and --min-share asks "
            f"for {100 * options.min_share:g} %: {len(fell)} layers fell back, {fell[0]['layer']} to {fell[0]['got']} for one ({fell[0]['reason']}); "
            "report.md there names all. Choose another --group-size or format, or a lower --min-share.",
            file=sys.stderr,
        )
        return PARTLY
    if options.eval and report["evaluation"] is None:
        print(f"llmcomp: not judged: {done}, but --eval could not be done; the warning says why", file=sys.stderr)
        return NOT_JUDGED
    return 0
