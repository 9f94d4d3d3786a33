"""Folders side by side: `llmcomp compare` as a script, for results that name their command.

python evaluation/compare.py FOLDER [FOLDER ...] --reference FOLDER_OR_HF --text FILE --windows 24 --output FOLDER
"""

from __future__ import annotations

import argparse
import sys

from llmcomp.cli.compare import add_arguments, run
from llmcomp.cli.main import guarded

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    sys.exit(guarded(run, parser.parse_args()))
