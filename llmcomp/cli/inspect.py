"""`llmcomp inspect FOLDER`: what an OpenVINO folder holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="tell what an OpenVINO folder holds, whoever wrote it")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Folder with openvino_model.xml.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    from dataclasses import asdict

    from llmcomp.cli.summary import print_inspection
    from llmcomp.inspect import inspect_folder

    found = inspect_folder(parsed.folder)
    if parsed.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print_inspection(parsed.folder, found)
    return 0
