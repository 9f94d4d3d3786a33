"""`llmcomp plan MODEL`: the plan as JSON, with exact sizes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from llmcomp.cli.arguments import add_arguments, check_file, options_of
from llmcomp.errors import OptionError
from llmcomp.options.table import PLAN


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="write what an export would do with each layer, as JSON to edit and feed back")
    add_arguments(parser, PLAN)
    parser.add_argument("-o", "--output-file", metavar="FILE", help="Write there instead of to standard output.")
    parser.add_argument("--table", metavar="FILE", help="With a budget: write the table of sizes against predicted losses there, as JSON.")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    options = options_of(parsed)
    for file in (parsed.output_file, parsed.table):
        if file:
            check_file(Path(file), options.overwrite)
    if parsed.table and options.budget is None:
        raise OptionError("--table", "only a budget has one", "Add --target-size, --target-bpw or --max-loss")
    from llmcomp.cli.progress import make_progress
    from llmcomp.cli.summary import print_budget
    from llmcomp.export import plan_model

    with make_progress(quiet=False, json_log=None, stream=sys.stderr) as progress:
        # A plan is about weights: a source without tokenizer has one too.
        plan = plan_model(options.model_copy(update={"no_tokenizer": True}), progress)
    if plan.budget is not None:
        # Beside a plan on standard output.
        print_budget(plan.budget, sys.stderr)
    if plan.budget is not None and parsed.table:
        points = [point.model_dump() for point in plan.budget.table]
        Path(parsed.table).write_text(json.dumps(points, indent=1) + "\n", encoding="utf8")
    text = plan.to_json()
    if parsed.output_file:
        Path(parsed.output_file).write_text(text, encoding="utf8")
    else:
        sys.stdout.write(text)
    return 0
