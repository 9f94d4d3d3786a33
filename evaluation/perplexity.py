"""Perplexity and KL divergence of OpenVINO folders: `llmcomp eval` as a script, for results that name their command.

python evaluation/perplexity.py FOLDER [FOLDER ...] --reference FOLDER_OR_HF --text FILE --windows 24 --json evaluation/results/NAME.json
"""

from __future__ import annotations

import argparse
import sys

from llmcomp.cli.eval import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
